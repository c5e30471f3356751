//! The file of tokens and certificates: who is known, and what each may do.
//!
//! ```toml
//! [[token]]
//! name = "shop"
//! hash = "sha256:…"                  # or token = "…", the token itself
//! allow = ["produce@orders.*", "view@*"]
//! expires = 2027-01-01T00:00:00Z     # may be left out
//! max_queues = 10                    # may be left out
//!
//! [[certificate]]
//! san = "worker.example"             # with mutual TLS: a DNS name or URI that the certificate is for
//! allow = ["consume@orders.*"]
//! ```

use std::{
    collections::HashMap,
    fmt::{self, Write as _},
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use rand::RngCore;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::domain::{Pattern, Permission};

/// What precedes the digits of a hash in the file.
const HASH_PREFIX: &str = "sha256:";
/// The fewest characters of a token that stands in the file as it is.
const MIN_TOKEN: usize = 16;
/// How many queues a token may create whose entry says nothing about it.
const MAX_QUEUES: u32 = 1_000;

/// The SHA-256 hash of a token.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TokenHash([u8; 32]);

impl TokenHash {
    /// Returns the hash of a token.
    pub(crate) fn of(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }

    fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix(HASH_PREFIX)?;
        let mut hash = [0; 32];
        if digits.len() != 2 * hash.len() || !digits.is_ascii() {
            return None;
        }
        for (at, byte) in hash.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
        }
        Some(Self(hash))
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HASH_PREFIX)?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:***")
    }
}

/// Somebody who is known: the bearer of a token, or the owner of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Principal {
    /// The name in the audit log.
    pub(crate) name: String,
    /// What is allowed.
    pub(crate) permissions: Vec<Permission>,
    /// When all permissions end.
    pub(crate) expires: Option<SystemTime>,
    /// Most queues among those that it may create; 0: no limit.
    pub(crate) max_queues: u32,
}

impl Principal {
    /// Returns true if the permissions have ended.
    pub(crate) fn is_expired(&self) -> bool {
        self.expires.is_some_and(|expires| expires <= SystemTime::now())
    }
}

/// Everybody who is known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tokens {
    tokens: HashMap<TokenHash, Arc<Principal>>,
    certificates: Vec<(Pattern, Arc<Principal>)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    token: Vec<TokenEntry>,
    #[serde(default)]
    certificate: Vec<CertificateEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenEntry {
    name: String,
    hash: Option<String>,
    token: Option<String>,
    allow: Vec<String>,
    expires: Option<toml::Value>,
    max_queues: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CertificateEntry {
    san: String,
    allow: Vec<String>,
    expires: Option<toml::Value>,
    max_queues: Option<u32>,
}

impl Tokens {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("\"{shown}\" cannot be read: {error}"))?;
        Self::parse(&text).map_err(|wrong| format!("\"{shown}\" is not usable: {wrong}"))
    }

    /// Parses the text of a file. No error quotes a token.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if let Some(instead) = instead_of_roles(text.lines()) {
            return Err(instead);
        }
        let file: File = toml::from_str(text).map_err(|error| {
            // The error itself shows the line, which may be that of a token.
            let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            format!("line {line}: {}", error.message())
        })?;
        let mut tokens = Self::default();
        for entry in file.token {
            let name = entry.name.clone();
            let (hash, principal) =
                token(entry).map_err(|wrong| format!("token {name:?}: {wrong}"))?;
            if let Some(same) = tokens.tokens.insert(hash, Arc::new(principal)) {
                return Err(format!("{:?} and {name:?} have the same token", same.name));
            }
        }
        for entry in file.certificate {
            let san = entry.san.clone();
            let principal =
                certificate(entry).map_err(|wrong| format!("certificate {san:?}: {wrong}"))?;
            tokens.certificates.push((Pattern::new(&san), Arc::new(principal)));
        }
        if tokens.tokens.is_empty() && tokens.certificates.is_empty() {
            // A file that lost its text must not let everybody in.
            return Err("there is no [[token]] and no [[certificate]] in it".to_owned());
        }
        Ok(tokens)
    }

    /// Returns whose token this is.
    pub(crate) fn bearer(&self, hash: TokenHash) -> Option<&Arc<Principal>> {
        // A guess whose hash is close to that of a token is no closer to the token, so the time that this takes tells nothing.
        self.tokens.get(&hash)
    }

    /// Returns whose certificate is for one of these names: the first entry that matches.
    pub(crate) fn owner(&self, names: &[String]) -> Option<&Arc<Principal>> {
        let matching = |(pattern, _): &&(Pattern, Arc<Principal>)| {
            names.iter().any(|name| pattern.matches(name))
        };
        self.certificates.iter().find(matching).map(|(_, principal)| principal)
    }
}

fn token(entry: TokenEntry) -> Result<(TokenHash, Principal), String> {
    let hash = match (&entry.hash, &entry.token) {
        (Some(hash), None) => TokenHash::parse(hash)
            .ok_or_else(|| format!("hash must be \"{HASH_PREFIX}\" and 64 hexadecimal digits"))?,
        (None, Some(token)) => {
            if token.len() < MIN_TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(format!(
                    "token must be {MIN_TOKEN} or more printable characters without spaces; \
                     `sluicegate token new NAME --allow PERMISSION` makes one"
                ));
            }
            TokenHash::of(token.as_bytes())
        }
        _ => return Err("give either hash or token".to_owned()),
    };
    let TokenEntry { name, allow, expires, max_queues, .. } = entry;
    Ok((hash, principal(name, &allow, expires.as_ref(), max_queues)?))
}

fn certificate(entry: CertificateEntry) -> Result<Principal, String> {
    if entry.san.is_empty() {
        return Err("san must be given; \"*\" stands for every certificate".to_owned());
    }
    principal(entry.san, &entry.allow, entry.expires.as_ref(), entry.max_queues)
}

fn principal(
    name: String,
    allow: &[String],
    expires: Option<&toml::Value>,
    max_queues: Option<u32>,
) -> Result<Principal, String> {
    if name.is_empty() || name.len() > 255 || name.chars().any(char::is_control) {
        return Err("the name must be 1 to 255 printable characters".to_owned());
    }
    if allow.is_empty() {
        return Err("allow is empty".to_owned());
    }
    let permissions = allow.iter().map(|text| Permission::parse(text)).collect::<Result<_, _>>()?;
    let expires = expires.map(|value| match value {
        toml::Value::Datetime(time) => instant(&time.to_string()),
        toml::Value::String(text) => instant(text),
        other => Err(format!("expires: {other} is not a time")),
    });
    let max_queues = max_queues.unwrap_or(MAX_QUEUES);
    Ok(Principal { name, permissions, expires: expires.transpose()?, max_queues })
}

/// Parses a time with its offset.
pub(crate) fn instant(text: &str) -> Result<SystemTime, String> {
    let time = timestamp(text)?;
    Ok(match u64::try_from(time.as_second()) {
        Ok(seconds) => SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
        Err(_) => SystemTime::UNIX_EPOCH,
    })
}

fn timestamp(text: &str) -> Result<jiff::Timestamp, String> {
    let wrong = |_| format!("{text:?} is not a time; write for example 2027-01-01T00:00:00Z");
    text.parse().map_err(wrong)
}

/// Returns what to write instead of entries `NAME:TOKEN:ROLE`, as brokers of earlier versions had them; `None` if there are
/// none. The text has no token in it.
pub(crate) fn instead_of_roles<'a>(entries: impl Iterator<Item = &'a str>) -> Option<String> {
    let entries = entries.map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut written = String::new();
    for entry in entries {
        let (name, rest) = entry.split_once(':')?;
        let (_, roles) = rest.rsplit_once(':')?;
        let mut allow = Vec::new();
        for role in roles.split('+') {
            allow.extend_from_slice(match role.trim() {
                "produce" => &["\"produce@*\"", "\"create@*\""][..],
                "consume" => &["\"consume@*\""],
                "admin" => &["\"admin@*\""],
                _ => return None,
            });
        }
        written.push_str(&entry_text(
            name,
            "token = \"THE TOKEN OF NOW\"",
            &allow.join(", "),
            None,
        ));
    }
    (!written.is_empty()).then(|| {
        format!(
            "NAME:TOKEN:ROLE is how earlier versions had tokens; write them into a TOML file that tokens_file names:\n\n\
             {written}"
        )
    })
}

fn entry_text(name: &str, secret: &str, allow: &str, expires: Option<&str>) -> String {
    let name = toml::Value::String(name.to_owned());
    let expires = expires.map(|time| format!("expires = {time}\n")).unwrap_or_default();
    format!("[[token]]\nname = {name}\n{secret}\nallow = [{allow}]\n{expires}\n")
}

/// A new token, and the entry that makes it known.
pub(crate) struct NewToken {
    /// The token, which is nowhere else.
    pub(crate) token: String,
    /// The entry for the file.
    pub(crate) entry: String,
}

/// Makes a token of 256 random bits. Checks what the entry says.
pub(crate) fn new_token(
    name: &str,
    allow: &[String],
    expires: Option<&str>,
) -> Result<NewToken, String> {
    let time = expires.map(|text| toml::Value::String(text.to_owned()));
    principal(name.to_owned(), allow, time.as_ref(), None)?;
    let mut random = [0; 32];
    rand::rng().fill_bytes(&mut random);
    let mut digits = String::with_capacity(2 * random.len());
    for byte in random {
        let _ = write!(digits, "{byte:02x}"); // a string takes all that is written to it
    }
    // The prefix is for people and for programs that search texts for secrets.
    let token = format!("sluicegate_{digits}");
    let hash = format!("hash = \"{}\"", TokenHash::of(token.as_bytes()));
    let allow: Vec<String> = allow.iter().map(|permission| format!("{permission:?}")).collect();
    // There are more ways to write a time than TOML knows.
    let expires = expires.map(|text| timestamp(text).map(|time| time.to_string())).transpose()?;
    let entry = entry_text(name, &hash, &allow.join(", "), expires.as_deref());
    // An entry that could not be read would make the whole file unusable.
    Tokens::parse(&entry).map_err(|wrong| format!("no file can hold this entry: {wrong}"))?;
    Ok(NewToken { token, entry })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Action;

    const FILE: &str = r#"
        [[token]]
        name = "shop"
        token = "0123456789abcdef"
        allow = ["produce@orders.*", "view@*"]

        [[token]]
        name = "old"
        hash = "sha256:9f9f0000f7b27a781f1f1ddde5ebc2dd2b796bfc7365c9c28b548e564176929f"
        allow = ["admin@*"]
        expires = 2020-01-01T00:00:00Z

        [[certificate]]
        san = "*.workers.example"
        allow = ["consume@orders.*"]
    "#;

    #[test]
    fn a_file_says_who_may_do_what() {
        let tokens = Tokens::parse(FILE).unwrap();
        let shop = tokens.bearer(TokenHash::of(b"0123456789abcdef")).unwrap();
        assert_eq!(shop.name, "shop");
        assert!(shop.permissions[0].allows(Action::Produce, "orders.eu"));
        assert!(!shop.is_expired());
        let old = tokens.tokens.values().find(|principal| principal.name == "old").unwrap();
        assert!(old.is_expired());
        assert!(tokens.bearer(TokenHash::of(b"0123456789abcdeF")).is_none());
        let names = |name: &str| vec!["other".to_owned(), name.to_owned()];
        assert!(tokens.owner(&names("a.workers.example")).is_some());
        assert!(tokens.owner(&names("workers.example")).is_none());
        assert!(!format!("{tokens:?}").contains("9f9f"), "{tokens:?}");
    }

    #[test]
    fn what_is_wrong_is_named_without_the_token() {
        let entry = |rest: &str| format!("[[token]]\nname = \"ann\"\n{rest}\n");
        for (text, expected) in [
            (String::new(), "no [[token]] and no [[certificate]]"),
            (entry("token = \"hunter2hunter2hunter2\""), "missing field `allow`"),
            (entry("token = \"hunter2\"\nallow = [\"view@*\"]"), "16 or more"),
            (entry("hash = \"hunter2\"\nallow = [\"view@*\"]"), "64 hexadecimal digits"),
            (entry("allow = [\"view@*\"]"), "either hash or token"),
            (entry("token = \"hunter2hunter2hunter2\"\nallow = []"), "allow is empty"),
            (entry("token = \"hunter2hunter2hunter2\"\nallow = [\"x@*\"]"), "is not an action"),
            (
                entry("token = \"hunter2hunter2hunter2\"\nallow = [\"view@*\"]\nexpires = 3"),
                "not a time",
            ),
            (
                entry("tokn = \"hunter2hunter2hunter2\"\nallow = [\"view@*\"]"),
                "line 3: unknown field",
            ),
            (entry("token = \"hunter2hunter2hunter2"), "line 3"),
        ] {
            let error = Tokens::parse(&text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
            assert!(!error.contains("hunter2"), "{text}: {error}");
        }
        let twice = entry("token = \"hunter2hunter2hunter2\"\nallow = [\"view@*\"]").repeat(2);
        assert!(Tokens::parse(&twice).unwrap_err().contains("have the same token"));
    }

    /// What is written instead is understood, with the token in its place.
    #[test]
    fn entries_of_earlier_versions_are_refused_with_what_to_write_instead() {
        let old = "# ours\n\nann:hunter2hunter2:hunter2:produce+consume\nbob:hunter2hunter2hunter3:admin\n";
        let error = Tokens::parse(old).unwrap_err();
        assert!(!error.contains("hunter2"), "{error}");
        let (_, written) = error.split_once("\n\n").unwrap();
        let mut number = 0;
        let written: Vec<String> = written
            .split("THE TOKEN OF NOW")
            .map(|part| {
                number += 1;
                format!("{part}0123456789abcdef{number}")
            })
            .collect();
        let written = written.concat();
        let written = written.trim_end_matches(|c: char| c.is_ascii_alphanumeric());
        let tokens = Tokens::parse(written).unwrap();
        let ann = tokens.bearer(TokenHash::of(b"0123456789abcdef1")).unwrap();
        let allowed = |action| ann.permissions.iter().any(|p| p.allows(action, "q"));
        assert_eq!(
            Action::ALL.map(allowed),
            [true, true, false, false, true, false],
            "what the roles allowed"
        );
    }

    #[test]
    fn a_new_token_is_known_by_its_entry() {
        let allow = vec!["produce@orders.*".to_owned()];
        let new = new_token("shop \"1\"", &allow, Some("2999-01-01T00:00:00Z")).unwrap();
        let tokens = Tokens::parse(&new.entry).unwrap();
        assert!(!new.entry.contains(&new.token));
        let shop = tokens.bearer(TokenHash::of(new.token.as_bytes())).unwrap();
        assert_eq!((shop.name.as_str(), shop.is_expired()), ("shop \"1\"", false));
        assert_ne!(new_token("shop", &allow, None).unwrap().token, new.token);
        assert!(new_token("shop", &["produce".to_owned()], None).is_err());
        assert!(new_token("shop", &allow, Some("tomorrow")).is_err());
    }

    #[test]
    fn every_way_to_write_a_time_becomes_one_that_the_file_can_hold() {
        let allow = ["view@*".to_owned()];
        for text in [
            "2027-01-01T00:00:00Z",
            "20270101T000000Z",
            "2027-01-01T00Z",
            "2027-01-01 01:00:00+01",
            "2027-01-01T00:00:00Z[UTC]",
        ] {
            let new = new_token("ann", &allow, Some(text)).unwrap();
            let tokens = Tokens::parse(&new.entry).unwrap();
            let ann = tokens.bearer(TokenHash::of(new.token.as_bytes())).unwrap();
            assert_eq!(ann.expires, instant("2027-01-01T00:00:00Z").ok(), "{text}");
        }
        assert!(new_token("ann", &allow, Some("-002027-01-01T00:00:00Z")).is_err());
    }
}
