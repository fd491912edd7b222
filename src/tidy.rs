//! The import table, enforced: a module names only the modules on its line.
//!
//! Two halves stay apart this way. The pure half (spec, backend, model, plan, attention) never sees
//! memory; the memory half (memory, view, ops, tables, dlpack) never sees policy. They meet in cache
//! and in ffi. The memory half calls kernels, the bodies that devices run too. Only cuda talks to the
//! CUDA driver.

use std::{fs, path::Path};

/// A module of the crate and the others it may name, each listed above it.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("num", &[]),
    ("json", &[]),
    ("log", &[]),
    ("dtype", &["num"]),
    ("spec", &["num", "dtype"]),
    ("backend", &["num", "dtype", "spec"]),
    ("model", &["num", "dtype", "spec", "backend"]),
    ("plan", &["num", "dtype", "spec", "backend", "model"]),
    (
        "attention",
        &["num", "dtype", "spec", "backend", "model", "plan"],
    ),
    ("cuda", &["num", "log"]),
    ("kernels", &["cuda"]),
    ("tables", &["num", "json", "cuda", "kernels"]),
    ("memory", &["num", "log", "cuda"]),
    ("view", &["num", "dtype", "spec", "backend"]),
    ("descriptor", &["num", "json", "dtype", "view"]),
    ("dlpack", &["dtype", "memory", "view"]),
    (
        "ops",
        &[
            "num",
            "cuda",
            "dtype",
            "spec",
            "view",
            "kernels",
            "descriptor",
        ],
    ),
    (
        "cache",
        &[
            "num",
            "json",
            "dtype",
            "spec",
            "backend",
            "model",
            "plan",
            "cuda",
            "memory",
            "view",
            "descriptor",
        ],
    ),
    (
        "ffi",
        &[
            "num",
            "json",
            "log",
            "dtype",
            "spec",
            "backend",
            "model",
            "plan",
            "cuda",
            "memory",
            "view",
            "descriptor",
            "dlpack",
            "cache",
            "attention",
            "tables",
            "ops",
        ],
    ),
];

#[test]
fn modules_import_only_what_the_table_allows() {
    let mut faults = Vec::new();
    for (path, module, depth) in sources() {
        let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| *name == module) else {
            faults.push(format!(
                "{path}: module {module} is missing from MAY_IMPORT"
            ));
            continue;
        };
        let text = fs::read_to_string(&path).unwrap();
        for (line, fault) in check(&module, allowed, depth, &text) {
            faults.push(format!("{path}:{line}: {fault}"));
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn table_has_no_cycle_and_no_ghost() {
    let present: Vec<String> = sources().into_iter().map(|(_, module, _)| module).collect();
    for (n, (module, allowed)) in MAY_IMPORT.iter().enumerate() {
        assert!(
            present.iter().any(|m| m == module),
            "src has no module {module}"
        );
        for import in *allowed {
            let above = MAY_IMPORT[..n].iter().any(|(name, _)| name == import);
            assert!(
                above,
                "{module} imports {import}, which is not listed above it"
            );
            assert_ne!(*import, "ffi", "nobody imports ffi");
        }
    }
}

/// Every source file of the library but lib.rs and this one: path, top-level module, and how many modules deep
/// the file's own items are.
fn sources() -> Vec<(String, String, usize)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    let mut pending = vec![src.clone()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                // Programs are crates of their own and see the library's public items only.
                if path != src.join("bin") {
                    pending.push(path);
                }
                continue;
            }
            let inner = path.strip_prefix(&src).unwrap().to_str().unwrap();
            let Some(inner) = inner.strip_suffix(".rs") else {
                continue;
            };
            let inner = inner.strip_suffix("/mod").unwrap_or(inner);
            if inner != "lib" && inner != "tidy" {
                let module = inner.split('/').next().unwrap().to_owned();
                found.push((path.display().to_string(), module, inner.split('/').count()));
            }
        }
    }
    found.sort();
    found
}

/// What `text`, a file `depth` modules deep in `module`, names without leave, with line numbers.
fn check(module: &str, allowed: &[&str], depth: usize, text: &str) -> Vec<(usize, String)> {
    let tokens = tokens(text);
    let is = |at: usize, word: &str| tokens.get(at).is_some_and(|(_, t)| *t == word);
    let mut faults = Vec::new();
    let mut braces = Vec::new(); // for each open one: does it open an inline module?
    for (at, (line, token)) in tokens.iter().enumerate() {
        let mut fault = |text: String| faults.push((*line, text));
        match *token {
            "{" => braces.push(at >= 2 && is(at - 2, "mod")),
            "}" => {
                braces.pop();
            }
            "crate" if is(at + 1, "as") || is(at + 1, ";") => {
                fault("may not rename the crate".into());
            }
            "crate" if is(at + 1, "::") => {
                for name in first_names(&tokens[at + 2..]) {
                    if name == "*" || name == "self" {
                        fault(format!("may not import crate::{name}; name a module"));
                    } else if name != module && !allowed.contains(&name) {
                        fault(format!("{module} may not import {name}"));
                    }
                }
            }
            "super" if is(at + 1, "::") => {
                let deep = depth + braces.iter().filter(|opens_module| **opens_module).count();
                if is(at + 2, "super") || first_names(&tokens[at + 2..]).contains(&"super") {
                    fault("may not climb with super::super; start from crate".into());
                } else if deep < 2 {
                    fault("super is the crate here; start from crate".into());
                }
            }
            "super" if is(at + 1, "as") => fault("may not rename super".into()),
            "extern" if is(at + 1, "crate") => fault("may not use extern crate".into()),
            "path" if at >= 2 && is(at - 1, "[") && is(at - 2, "#") => {
                fault("may not place a module with #[path]".into());
            }
            _ => {}
        }
    }
    faults
}

/// First segments of the path or of the `{…}` group that starts `tokens`.
fn first_names<'t>(tokens: &[(usize, &'t str)]) -> Vec<&'t str> {
    let mut names = Vec::new();
    let mut depth = 0;
    let mut fresh = true; // at the start of a path
    for (_, token) in tokens {
        match *token {
            "{" if fresh => depth += 1,
            "{" => {
                // The inside of `a::{…}` is a's business.
                depth += 1;
                fresh = false;
                continue;
            }
            "}" => {
                depth -= 1;
                if depth == 0 {
                    return names;
                }
            }
            "," if depth == 1 => fresh = true,
            name if fresh => {
                names.push(name);
                if depth == 0 {
                    return names;
                }
                fresh = false;
            }
            _ => {}
        }
    }
    names
}

/// Words, `::` and single other characters of Rust code with their lines. Comments, strings and
/// character literals are left out.
fn tokens(text: &str) -> Vec<(usize, &str)> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut line = 1;
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if let Some(length) = string(rest) {
            length
        } else if first == '\'' {
            character(rest)
        } else if first.is_whitespace() {
            first.len_utf8()
        } else {
            let length = match rest.find(|c| !word(c)).unwrap_or(rest.len()) {
                0 if rest.starts_with("::") => 2,
                0 => first.len_utf8(),
                length => length,
            };
            found.push((line, &rest[..length]));
            length
        };
        line += rest[..length].matches('\n').count();
        rest = &rest[length..];
    }
    found
}

/// Length of the block comment that starts `text`; comments nest.
fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        let step = match text.as_bytes()[at..] {
            [b'/', b'*', ..] => {
                depth += 1;
                2
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                2
            }
            _ => 1,
        };
        at += step;
        if depth == 0 {
            break;
        }
    }
    at
}

/// Length of the string literal that starts `text`, of any kind, if one does.
fn string(text: &str) -> Option<usize> {
    let prefix = text
        .find(|c| !matches!(c, 'b' | 'c' | 'r'))
        .filter(|length| *length <= 2)?;
    let raw = text[..prefix].contains('r');
    let hashes = text[prefix..]
        .find(|c| c != '#')
        .filter(|count| raw || *count == 0)?;
    let open = prefix + hashes;
    let body = text[open..].strip_prefix('"')?;
    if raw {
        let close = format!("\"{}", "#".repeat(hashes));
        let end = body
            .find(&close)
            .map_or(text.len(), |at| open + 1 + at + close.len());
        return Some(end);
    }
    let mut escaped = false;
    for (at, c) in body.char_indices() {
        match c {
            '"' if !escaped => return Some(open + 1 + at + 1),
            _ => escaped = c == '\\' && !escaped,
        }
    }
    Some(text.len())
}

/// Length of the character literal, or of the quote of the lifetime, that starts `text`.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => {
            chars.next(); // the escaped one, which may be a quote
            chars
                .find(|(_, c)| *c == '\'')
                .map_or(text.len(), |(at, _)| at + 1)
        }
        Some(_) => match chars.next() {
            Some((at, '\'')) => at + 1,
            _ => 1,
        },
        None => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::{check, tokens};

    /// Faults of `text` in a file of module plan, which may import num and spec.
    fn faults(depth: usize, text: &str) -> Vec<String> {
        check("plan", &["num", "spec"], depth, text)
            .into_iter()
            .map(|(_, fault)| fault)
            .collect()
    }

    #[test]
    fn accepts_what_the_table_allows() {
        for text in [
            "use crate::num::Bytes;",
            "use crate::{num::{Bytes, view}, spec};",
            "use crate::plan::group::Group;",
            "use super::group::Group;",
            "pub(crate) fn f() {}",
            "pub(super) fn f(x: crate::spec::Spec) -> u8 { crate::num::checked(x) }",
            "// crate::view\n/* crate::view /* crate::cache */ super::super */",
            "/// See [`crate::view`].\nfn f() {}",
            "const A: &str = \"crate::view\"; const B: &str = r#\"\"crate::view\"#;",
            "fn f<'a>(x: &'a str) -> char { '\"' } const C: &str = \"\\\"crate::view\";",
            "use self::group::Group;",
        ] {
            assert_eq!(faults(2, text), Vec::<String>::new(), "{text}");
        }
        let nested = "fn f() {} mod tests { use super::*; fn g() { super::f() } }";
        assert_eq!(faults(1, nested), Vec::<String>::new());
    }

    #[test]
    fn refuses_what_it_does_not() {
        for (text, wanted) in [
            ("use crate::view::View;", "plan may not import view"),
            ("use crate::view;", "plan may not import view"),
            ("use crate :: view;", "plan may not import view"),
            ("use crate::{num, view};", "plan may not import view"),
            (
                "use crate::{\n    num::{Bytes, Id},\n    view::View,\n};",
                "plan may not import view",
            ),
            ("use {crate::num, crate::view};", "plan may not import view"),
            (
                "use ::std::fmt; fn f() { crate::view::g() }",
                "plan may not import view",
            ),
            (
                "type T = Vec<crate::view::View>;",
                "plan may not import view",
            ),
            (
                "macro_rules! m { () => { $crate::view::g() } }",
                "plan may not import view",
            ),
            ("pub(in crate::view) fn f() {}", "plan may not import view"),
            (
                "fn f<'a>(x: &'a crate::view::View) {}",
                "plan may not import view",
            ),
            (
                "const C: char = '\\''; use crate::view;",
                "plan may not import view",
            ),
            ("use crate::*;", "may not import crate::*; name a module"),
            (
                "use crate::{self as k};",
                "may not import crate::self; name a module",
            ),
            ("use crate as k;", "may not rename the crate"),
            ("use super as s;", "may not rename super"),
            (
                "use super::super::view;",
                "may not climb with super::super; start from crate",
            ),
            (
                "use super::{group, super::view};",
                "may not climb with super::super; start from crate",
            ),
            ("extern crate self as k;", "may not use extern crate"),
            (
                "#[path = \"view.rs\"] mod v;",
                "may not place a module with #[path]",
            ),
        ] {
            assert_eq!(
                faults(2, text).first().map(String::as_str),
                Some(wanted),
                "{text}"
            );
        }
        for text in [
            "use super::view;",
            "use self::super::view;",
            "fn f() { super::view::g() }",
        ] {
            assert_eq!(
                faults(1, text),
                ["super is the crate here; start from crate"],
                "{text}"
            );
        }
    }

    #[test]
    fn counts_lines() {
        let text = "// one\n\"two\nthree\" four /* five\n*/ six";
        assert_eq!(tokens(text), [(3, "four"), (4, "six")]);
    }
}
