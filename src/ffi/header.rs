//! `include/kvpages/kvpages.h` is generated from the files beside this one, and committed.
//!
//! These tests fail when it is stale; `KVPAGES_BLESS=1 cargo test header` writes it anew.

use std::{collections::HashMap, env, fmt::Write, fs, path::Path};

/// Every file that exports, in the order of the header's sections.
const SOURCES: &[&str] = &[
    "version",
    "status",
    "log",
    "types",
    "spec",
    "sizing",
    "backend",
    "model",
    "plan",
    "device",
    "memory",
    "cache",
    "view",
    "dlpack",
    "bind",
    "attention",
    "metadata",
    "tables",
    "ops",
    "snapshot",
    "descriptor",
    "reshard",
];

const HEADER: &str = "include/kvpages/kvpages.h";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn generate() -> String {
    let ffi = root().join("src/ffi");
    let mut config = cbindgen::Config::from_file(ffi.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new();
    // A file at a time: given the crate, cbindgen would run `cargo metadata` inside the test.
    for source in SOURCES {
        let path = ffi.join(format!("{source}.rs"));
        let Ok(text) = fs::read_to_string(&path) else {
            continue; // has_every_exporting_file tells
        };
        config.export.include.extend(public_types(&text));
        builder = builder.with_src(path);
    }
    let mut bytes = Vec::new();
    builder
        .with_config(config)
        .generate()
        .unwrap()
        .write(&mut bytes);
    finish(&String::from_utf8(bytes).unwrap())
}

/// Names of the types that a source file exports. cbindgen on its own leaves out those that no
/// function mentions, and an enum is such a type: it comes in as a plain integer.
fn public_types(source: &str) -> impl Iterator<Item = String> {
    source.lines().filter_map(|line| {
        let mut words = line
            .strip_prefix("pub ")?
            .split(|c: char| !c.is_alphanumeric() && c != '_');
        let exported = matches!(words.next()?, "enum" | "struct" | "type" | "union");
        words
            .next()
            .filter(|name| exported && name.starts_with("kvpages_"))
            .map(str::to_owned)
    })
}

#[test]
fn is_current() {
    let generated = generate();
    let path = root().join(HEADER);
    if env::var_os("KVPAGES_BLESS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &generated).unwrap();
    }
    assert!(
        fs::read_to_string(&path).unwrap_or_default() == generated,
        "{HEADER} is stale: run KVPAGES_BLESS=1 cargo test header"
    );
}

#[test]
fn states_the_version_of_the_package() {
    let header = generate();
    for (part, value) in [
        ("MAJOR", env!("CARGO_PKG_VERSION_MAJOR")),
        ("MINOR", env!("CARGO_PKG_VERSION_MINOR")),
        ("PATCH", env!("CARGO_PKG_VERSION_PATCH")),
    ] {
        let line = format!("#define KVPAGES_VERSION_{part} {value}\n");
        assert!(header.contains(&line), "cbindgen.toml lacks {line}");
    }
}

#[test]
fn has_every_exporting_file() {
    let ffi = root().join("src/ffi");
    for source in SOURCES {
        let path = ffi.join(format!("{source}.rs"));
        assert!(
            path.exists(),
            "SOURCES has {source}, but there is no src/ffi/{source}.rs"
        );
    }
    for entry in fs::read_dir(ffi).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        if path.extension().is_some_and(|e| e == "rs") && name != "header" {
            let exports = fs::read_to_string(&path)
                .unwrap()
                .lines()
                .any(|line| line.trim_start().starts_with("#[unsafe(no_mangle)]"));
            assert!(
                !exports || SOURCES.contains(&name),
                "src/ffi/{name}.rs exports, but SOURCES in header.rs does not have it"
            );
        }
    }
}

/// What rustdoc understands and a C reader does not.
#[test]
fn is_free_of_rustdoc() {
    for (n, line) in generate().lines().enumerate() {
        for leak in [
            "# Safety", "# Errors", "# Panics", "[`", "crate::", "```", "Option<",
        ] {
            assert!(!line.contains(leak), "line {} has {leak}: {line}", n + 1);
        }
    }
}

/// Adds what cbindgen does not write: parentheses around a negative constant, and behind every
/// struct that starts with `struct_size` its `KVPAGES_X_INIT {sizeof(kvpages_x), 0, ...}`, with
/// every field spelled out so that no compiler warns of missing ones.
fn finish(header: &str) -> String {
    let mut out = String::new();
    let mut comment = false;
    let mut fields: Option<Vec<String>> = None; // those of the struct being read
    let mut field = String::new();
    let mut initialisers = HashMap::new(); // of the structs and function pointers seen
    for line in header.lines() {
        match line
            .strip_prefix("#define ")
            .and_then(|define| define.split_once(" -"))
        {
            Some((name, digits)) => writeln!(out, "#define {name} (-{digits})").unwrap(),
            None => writeln!(out, "{line}").unwrap(),
        }
        let code = line.trim();
        comment |= code.starts_with("/*");
        if comment {
            comment = !code.ends_with("*/");
            continue;
        }
        if code.starts_with("typedef struct ") && code.ends_with('{') {
            fields = Some(Vec::new());
        } else if let Some(rest) = code.strip_prefix("typedef ")
            && let Some((_, rest)) = rest.split_once("(*")
            && let Some((name, _)) = rest.split_once(')')
        {
            initialisers.insert(name.to_owned(), "NULL".to_owned());
        } else if let Some(name) = code.strip_prefix("} ").and_then(|c| c.strip_suffix(';'))
            && let Some(fields) = fields.take()
        {
            let extensible = fields.first().is_some_and(|f| f == "size_t struct_size;");
            let values: Vec<String> = fields
                .iter()
                .map(|field| match field.as_str() {
                    "size_t struct_size;" => format!("sizeof({name})"),
                    field => initialiser(field, &initialisers),
                })
                .collect();
            if extensible {
                out.push_str(&define(name, &values));
            }
            initialisers.insert(name.to_owned(), format!("{{{}}}", values.join(", ")));
        } else if let Some(fields) = &mut fields {
            field.push_str(code);
            if code.ends_with(';') {
                fields.push(std::mem::take(&mut field));
            } else {
                field.push(' ');
            }
        }
    }
    out
}

/// The zero of one field, which is given as its declaration.
fn initialiser(field: &str, known: &HashMap<String, String>) -> String {
    let declaration = field.trim_end_matches(';').trim_start_matches("struct ");
    let kind = declaration.split_whitespace().next().unwrap_or_default();
    if declaration.contains('[') {
        let element = declaration.split('[').next().unwrap();
        let dimensions = declaration.matches('[').count();
        let zero = initialiser(element, known);
        return format!("{}{zero}{}", "{".repeat(dimensions), "}".repeat(dimensions));
    }
    if declaration.contains('*') {
        return "NULL".into();
    }
    match kind {
        "bool" => "false".into(),
        "float" | "double" => "0.0".into(),
        _ => known.get(kind).cloned().unwrap_or_else(|| "0".into()),
    }
}

/// The macro's definition, wrapped like the rest of the header.
fn define(name: &str, values: &[String]) -> String {
    let upper = name.to_uppercase();
    let mut text = format!("\n/** {name} with struct_size set and all else zero. */\n");
    let mut line = format!("#define {upper}_INIT {{");
    for (n, value) in values.iter().enumerate() {
        let piece = if n + 1 < values.len() {
            format!("{value},")
        } else {
            format!("{value}}}")
        };
        if line.len() + piece.len() > 76 {
            writeln!(text, "{} \\", line.trim_end()).unwrap();
            line = "    ".into();
        }
        line.push_str(&piece);
        line.push(' ');
    }
    writeln!(text, "{}", line.trim_end()).unwrap();
    text
}

#[test]
fn init_macros_spell_out_every_field() {
    let header = "\
#define KVPAGES_SLOT -1
typedef int32_t (*kvpages_fn)(void *user);

/**
 * typedef struct kvpages_fake {
 */
typedef struct kvpages_plain {
    uint32_t a;
    int64_t dims[8];
} kvpages_plain;

typedef struct kvpages_config {
    size_t struct_size;
    const char *name;
    struct kvpages_plain plain;
    struct kvpages_plain plains[2];
    bool flag;
    /**
     * A comment;
     */
    double share;
    kvpages_fn call;
    int32_t (*other)(size_t bytes,
                     void *user);
} kvpages_config;
";
    let expected = "\
#define KVPAGES_CONFIG_INIT {sizeof(kvpages_config), NULL, {0, {0}}, \\
    {{0, {0}}}, false, 0.0, NULL, NULL}
";
    let finished = finish(header);
    assert!(
        finished.starts_with("#define KVPAGES_SLOT (-1)\n"),
        "{finished}"
    );
    assert!(finished.ends_with(expected), "{finished}");
    assert_eq!(finished.matches("#define").count(), 2, "{finished}");
}
