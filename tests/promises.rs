//! docs/abi.md names a test for each promise: each of those is there.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page() -> String {
    fs::read_to_string(root().join("docs/abi.md")).unwrap()
}

/// What stands between backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

fn sources(extension: &str) -> String {
    let mut pending: Vec<PathBuf> = vec![root().join("cpp_tests")];
    let mut text = String::new();
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                pending.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                text.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }
    text
}

/// `Suite.Name`, both of which begin with a capital.
fn as_test(name: &str) -> Option<(&str, &str)> {
    let (suite, name) = name.split_once('.')?;
    let is_word = |word: &str| {
        word.starts_with(|first: char| first.is_ascii_uppercase())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    (is_word(suite) && is_word(name)).then_some((suite, name))
}

#[test]
fn every_test_that_is_named_is_there() {
    let (page, sources) = (page(), sources("cc"));
    let named: Vec<_> = quoted(&page).into_iter().filter_map(as_test).collect();
    assert!(named.len() > 20, "{named:?}");
    for (suite, name) in named {
        let found = ["TEST", "TEST_F", "TEST_P"]
            .iter()
            .any(|kind| sources.contains(&format!("{kind}({suite}, {name})")));
        assert!(found, "there is no {suite}.{name}");
    }
}

#[test]
fn every_step_that_is_named_is_there() {
    let page = page();
    let steps = fs::read_to_string(root().join("scripts/test")).unwrap();
    let mut named = 0;
    // A list of steps goes on as far as backquotes follow each other with a comma or an "and".
    for list in page
        .split("step ")
        .skip(1)
        .chain(page.split("steps ").skip(1))
    {
        let mut rest = list;
        while let Some((step, behind)) = rest.strip_prefix('`').and_then(|r| r.split_once('`')) {
            let is_there = steps.contains(&format!("step_{step}()"));
            assert!(is_there, "scripts/test has no step {step}");
            named += 1;
            let separators = [", ", " and "];
            let next = separators.iter().find_map(|s| behind.strip_prefix(s));
            rest = next.filter(|next| as_step(next)).unwrap_or("");
        }
    }
    assert!(named >= 12, "{named}");
}

/// Whether the next name is a step, not a test or a file.
fn as_step(text: &str) -> bool {
    let name = text.strip_prefix('`').and_then(|text| text.split_once('`'));
    name.is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
}

#[test]
fn every_file_that_is_named_is_there() {
    let page = page();
    for name in quoted(&page) {
        let is_file = name.contains('/') && (name.ends_with(".rs") || name.ends_with(".cc"));
        assert!(!is_file || root().join(name).exists(), "there is no {name}");
    }
}
