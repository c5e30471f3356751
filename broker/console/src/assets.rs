//! Style, script and the vendored chart library, which are parts of the binary. `assets/README.md` lists what is vendored.

use axum::{
    Router,
    extract::Path,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};

struct Asset {
    name: &'static str,
    content_type: &'static str,
    text: &'static str,
}

const ASSETS: [Asset; 5] = [
    Asset {
        name: "console.css",
        content_type: "text/css; charset=utf-8",
        text: include_str!("../assets/console.css"),
    },
    Asset {
        name: "console.js",
        content_type: "text/javascript; charset=utf-8",
        text: include_str!("../assets/console.js"),
    },
    Asset {
        name: "uplot.css",
        content_type: "text/css; charset=utf-8",
        text: include_str!("../assets/uplot.css"),
    },
    Asset {
        name: "uplot.js",
        content_type: "text/javascript; charset=utf-8",
        text: include_str!("../assets/uplot.js"),
    },
    Asset {
        name: "icon.svg",
        content_type: "image/svg+xml",
        text: include_str!("../assets/icon.svg"),
    },
];

/// Returns the address of an asset. The address changes with the content, so that browsers may keep it for ever.
pub(crate) fn address(name: &str) -> String {
    let text = ASSETS.iter().find(|asset| asset.name == name).map_or("", |asset| asset.text);
    format!("/assets/{name}?v={:016x}", crate::text::fingerprint(text))
}

pub(crate) fn routes() -> Router {
    Router::new().route("/assets/{name}", get(serve))
}

async fn serve(Path(name): Path<String>) -> Response {
    let Some(asset) = ASSETS.iter().find(|asset| asset.name == name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let headers = [
        (header::CONTENT_TYPE, asset.content_type),
        (header::CACHE_CONTROL, "public, max-age=31536000, immutable"),
    ];
    (headers, asset.text).into_response()
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write as _, fs, path::Path};

    use sha2::{Digest as _, Sha256};

    /// Whoever replaces a vendored file says so in the table.
    #[test]
    fn vendored_files_are_those_of_the_table() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
        let table = fs::read_to_string(folder.join("README.md")).unwrap();
        let mut listed = Vec::new();
        for line in table.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = line.split('|').map(|cell| cell.trim().trim_matches('`')).collect();
            let [_, file, version, licence, checksum, ..] = cells[..] else { panic!("{line}") };
            assert!(!version.is_empty() && !licence.is_empty(), "{line}");
            let digest = Sha256::digest(fs::read(folder.join(file)).unwrap());
            let digest = digest.iter().fold(String::new(), |mut text, byte| {
                write!(text, "{byte:02x}").unwrap();
                text
            });
            assert_eq!(digest, checksum, "{file}");
            listed.push(file.to_owned());
        }
        let own = ["README.md", "console.css", "console.js", "icon.svg"];
        for entry in fs::read_dir(folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(own.contains(&&*name) || listed.contains(&name), "{name} is not in the table");
        }
    }
}
