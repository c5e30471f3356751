//! A payload as text, as folded JSON and as a dump. Whatever is in it is escaped, and as much is shown as a page can bear.

use maud::{Markup, html};
use serde_json::Value;

use crate::text;

/// The most bytes that are shown as text.
const MOST_TEXT: usize = 64 << 10;
/// The most bytes that are shown as a dump, each of which takes four characters.
const MOST_HEX: usize = 4 << 10;
/// The most bytes of JSON that are folded.
const MOST_JSON: usize = 256 << 10;
/// The most entries of one object or array that are shown.
const MOST_ENTRIES: usize = 200;
/// The most values of a payload that are shown.
const MOST_VALUES: usize = 3_000;
/// Objects and arrays are open down to this depth.
const OPEN_DEPTH: usize = 2;

/// Returns the payload in all its forms, with a link to all of it.
pub(super) fn show(payload: &[u8], content_type: &str, download: &str) -> Markup {
    let text = std::str::from_utf8(payload).ok();
    let json = text.filter(|text| text.len() <= MOST_JSON && !text.trim().is_empty());
    let json = json.and_then(|text| serde_json::from_str::<Value>(text).ok());
    let json = json.filter(|value| value.is_object() || value.is_array());
    let is_json = json.is_some();
    html! {
        p.quiet {
            (text::bytes(payload.len()))
            @if !content_type.is_empty() { ", " (content_type) }
            " · " a href=(download) download { "Download" }
        }
        @if let Some(json) = &json {
            details name="payload" open { summary { "JSON" } div.json { (tree(json)) } }
        }
        details name="payload" open[!is_json && text.is_some()] { summary { "Text" } (as_text(payload)) }
        details name="payload" open[text.is_none()] { summary { "Hex" } (as_hex(payload)) }
    }
}

fn as_text(payload: &[u8]) -> Markup {
    let shown = &payload[..payload.len().min(MOST_TEXT)];
    let text: String = String::from_utf8_lossy(shown).chars().map(text::printable).collect();
    html! {
        pre tabindex="0" { code { (text) } }
        @if payload.len() > shown.len() { (cut(shown.len(), payload.len())) }
    }
}

fn as_hex(payload: &[u8]) -> Markup {
    let shown = &payload[..payload.len().min(MOST_HEX)];
    html! {
        pre tabindex="0" { code { (text::hex(shown)) } }
        @if payload.len() > shown.len() { (cut(shown.len(), payload.len())) }
    }
}

fn cut(shown: usize, all: usize) -> Markup {
    html! { p.quiet { "The first " (text::bytes(shown)) " of " (text::bytes(all)) ". Download it to see the rest." } }
}

fn tree(json: &Value) -> Markup {
    let mut left = MOST_VALUES;
    let tree = value(json, 0, &mut left);
    html! { (tree) @if left == 0 { p.quiet { "There is more. Download it to see the rest." } } }
}

/// Returns one value. The parser bounds the depth.
fn value(json: &Value, depth: usize, left: &mut usize) -> Markup {
    *left = left.saturating_sub(1);
    match json {
        Value::Null => html! { span.null { "null" } },
        Value::Bool(it) => html! { span.bool { (it) } },
        Value::Number(it) => html! { span.digits { (it.to_string()) } },
        Value::String(it) => {
            html! { span.string { "\"" (it.chars().map(text::printable).collect::<String>()) "\"" } }
        }
        Value::Array(entries) => {
            let names = (0..entries.len()).map(|at| at.to_string());
            fold(("[", "]"), names.zip(entries), entries.len(), depth, left)
        }
        Value::Object(entries) => {
            let named = entries
                .iter()
                .map(|(name, value)| (name.chars().map(text::printable).collect(), value));
            fold(("{", "}"), named, entries.len(), depth, left)
        }
    }
}

fn fold<'a>(
    (open, close): (&str, &str),
    entries: impl Iterator<Item = (String, &'a Value)>,
    length: usize,
    depth: usize,
    left: &mut usize,
) -> Markup {
    if length == 0 {
        return html! { span.quiet { (open) (close) } };
    }
    html! {
        details.fold open[depth < OPEN_DEPTH] {
            summary { span.quiet { (open) " " (text::counted(length as i64, "entry").replace("entrys", "entries")) " " (close) } }
            ul {
                @for (name, entry) in entries.take(MOST_ENTRIES) {
                    @if *left > 0 { li { span.name { (name) } ": " (value(entry, depth + 1, left)) } }
                }
                @if length > MOST_ENTRIES { li.quiet { "and " (text::count((length - MOST_ENTRIES) as i64)) " more" } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(payload: &[u8]) -> String {
        show(payload, "", "/download").into_string()
    }

    #[test]
    fn no_payload_becomes_markup() {
        let hostile = "</code></pre><script>alert(1)</script><img src=x onerror=alert(1)>";
        for payload in [hostile.to_owned(), serde_json::json!({ hostile: [hostile] }).to_string()] {
            let page = page(payload.as_bytes());
            assert!(!page.contains("<script") && !page.contains("<img"), "{page}");
        }
        let typed = show(b"", "text/html\"><script>", "/").into_string();
        assert!(!typed.contains("<script"), "{typed}");
    }

    #[test]
    fn bytes_that_are_no_text_are_dumped() {
        let page = page(&[0xff, 0xfe, 0, 1]);
        assert!(page.contains("ff fe 00 01") && page.contains("open><summary>Hex"), "{page}");
    }

    #[test]
    fn large_payloads_are_cut() {
        let large = page(&vec![b'x'; 3 << 20]);
        assert!(large.len() < 200_000 && large.contains("The first 64.0 KiB of 3.0 MiB"));
        let numbers: Vec<u32> = (0..30_000).collect();
        let many = page(serde_json::to_string(&numbers).unwrap().as_bytes());
        assert!(many.contains("and 29,800 more") && many.len() < 400_000, "{}", many.len());
        let nested: Vec<Vec<u32>> = vec![numbers[..150].to_vec(); 150];
        let nested = page(serde_json::to_string(&nested).unwrap().as_bytes());
        assert!(nested.contains("There is more."));
    }

    #[test]
    fn deep_json_is_text() {
        let deep = "[".repeat(10_000) + &"]".repeat(10_000);
        assert!(page(deep.as_bytes()).contains("<summary>Text"));
    }
}
