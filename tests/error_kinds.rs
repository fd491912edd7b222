//! docs/error-kinds.md has the kinds of errors that the sources have, and no others.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The first column of each table.
fn listed() -> BTreeSet<String> {
    let page = fs::read_to_string(root().join("docs/error-kinds.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let kinds = rows.flat_map(|row| {
        let cell = row.split('|').next().unwrap();
        cell.split(['`', ',', ' ']).filter(|kind| !kind.is_empty())
    });
    kinds.map(str::to_owned).collect()
}

/// The library's sources, each without its tests.
fn sources() -> Vec<String> {
    let mut pending: Vec<PathBuf> = vec![root().join("src")];
    let mut texts = Vec::new();
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("bin") {
                pending.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(path).unwrap();
                let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
                texts.push(code.to_owned());
            }
        }
    }
    texts
}

/// What stands in the braces after each `start`.
fn bodies<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let bodies = text.match_indices(start).map(|(at, _)| {
        let body = &text[at..];
        let mut depth = 0;
        let end = body.find(|letter| {
            depth += i32::from(letter == '{') - i32::from(letter == '}');
            letter == '}' && depth == 0
        });
        &body[..end.unwrap_or(body.len())]
    });
    bodies.collect()
}

fn is_kind(word: &str) -> bool {
    let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    !word.is_empty() && word.chars().all(letters)
}

/// A literal that an arm of a match gives.
fn given_by_arms(body: &str) -> impl Iterator<Item = &str> {
    body.split("=>").skip(1).filter_map(|arm| {
        let value = arm.trim_start().trim_start_matches('{').trim_start();
        value.strip_prefix('"')?.split('"').next()
    })
}

fn in_sources() -> BTreeSet<String> {
    let mut kinds = BTreeSet::new();
    for text in sources() {
        for start in [
            "fn kind(&self) -> &'static str",
            "fn audit_kind(",
            "fn view_kind(",
            "let kind = match",
        ] {
            let found = bodies(&text, start).into_iter().flat_map(given_by_arms);
            kinds.extend(found.map(str::to_owned));
        }
        for call in [
            "Failure::invalid(",
            "Failure::unsupported(",
            "Failure::stopped(",
            ".with_kind(",
            "kvpages_status::",
        ] {
            let behind = text.split(call).skip(1).map(|behind| match call {
                // Failure::new(kvpages_status::NullArgument, "null_argument", message)
                "kvpages_status::" => behind.split_once(',').map_or("", |(_, rest)| rest),
                _ => behind,
            });
            let literals = behind.filter_map(|b| b.trim_start().strip_prefix('"'));
            let found = literals.filter_map(|literal| literal.split('"').next());
            kinds.extend(found.map(str::to_owned));
        }
    }
    kinds.retain(|kind| is_kind(kind));
    kinds
}

#[test]
fn the_page_lists_the_kinds_of_the_sources() {
    let (listed, found) = (listed(), in_sources());
    assert!(found.len() > 140, "{found:?}");
    let missing: Vec<_> = found.difference(&listed).collect();
    assert!(missing.is_empty(), "docs/error-kinds.md lacks {missing:?}");
    let stale: Vec<_> = listed.difference(&found).collect();
    assert!(stale.is_empty(), "no source has {stale:?}");
}
