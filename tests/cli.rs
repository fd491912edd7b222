//! The command-line tool as people run it.
#![cfg(feature = "cli")]

use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const TOOL: &str = env!("CARGO_BIN_EXE_kvpages");

fn fixture(name: &str) -> String {
    format!(
        "{}/tests/cli/configs/{name}.json",
        env!("CARGO_MANIFEST_DIR")
    )
}

fn run(arguments: &[&str]) -> Output {
    Command::new(TOOL)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Standard output of a run that must succeed.
fn said(arguments: &[&str]) -> String {
    let output = run(arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    assert_eq!(stderr, "", "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// What a run that must fail with `code` says on standard error.
fn refused(arguments: &[&str], code: i32) -> String {
    let output = run(arguments);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{arguments:?}");
    stderr
}

fn plan(name: &str, arguments: &[&str]) -> String {
    let config = fixture(name);
    said(&[&["plan", config.as_str()], arguments].concat())
}

fn json(name: &str, arguments: &[&str]) -> Value {
    serde_json::from_str(&plan(name, &[arguments, &["--json"]].concat())).unwrap()
}

fn every_fixture() -> Vec<String> {
    let folder = format!("{}/tests/cli/configs", env!("CARGO_MANIFEST_DIR"));
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| name.strip_suffix(".json").map(str::to_owned))
        .collect();
    names.sort();
    assert!(names.len() > 40, "{names:?}");
    names
}

#[test]
fn llama_takes_what_anyone_computes() {
    // 32 layers of 8 heads, 128 elements of a key and of a value, 2 bytes each.
    let bytes = 32 * 8 * (128 + 128) * 2;
    let answer = json("llama", &["--memory", "40GiB"]);
    assert_eq!(answer["bytes_per_further_token"], f64::from(bytes));
    assert_eq!(answer["longest"]["bytes_per_token"], f64::from(bytes));
    assert_eq!(answer["longest"]["len"], 131_072);
    // 40 GiB are 20480 blocks of 16 tokens, and one is kept.
    assert_eq!(answer["longest"]["tokens"], 20_479 * 16);
    let text = plan("llama", &["--memory", "40GiB"]);
    for part in [
        "131,072",
        "327,664",
        "full attention",
        "head_dim is not given",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    let fp8 = json(
        "llama",
        &["--memory", "40GiB", "--kv-dtype", "fp8", "--tp", "8"],
    );
    assert_eq!(fp8["bytes_per_further_token"], f64::from(bytes / 16));
    assert_eq!(
        fp8["bytes_per_further_token_all_ranks"],
        f64::from(bytes / 2)
    );
}

#[test]
fn every_family_is_planned() {
    for name in every_fixture() {
        if name == "unknown_states" {
            continue;
        }
        let len = if name == "whisper" { "448" } else { "1024" };
        for policy in ["compact", "reference"] {
            let arguments = [
                "--memory",
                "24GiB",
                "--max-model-len",
                len,
                "--policy",
                policy,
            ];
            let answer = json(&name, &arguments);
            assert_eq!(answer["version"], 1, "{name}");
            assert!(
                answer["longest"]["requests"].as_f64().unwrap() >= 1.0,
                "{name} {policy}"
            );
            let groups = answer["groups"].as_array().unwrap();
            let layers: u64 = groups
                .iter()
                .map(|group| group["layers"].as_u64().unwrap())
                .sum();
            assert!(layers > 0, "{name}");
            assert_eq!(
                answer["explanation"]["workers"][0]["memory_bytes"],
                24u64 << 30,
                "{name}"
            );
        }
    }
}

#[test]
fn json_has_what_the_document_says() {
    let answer = json("gemma4", &["--memory", "40GiB"]);
    for (place, keys) in [
        (
            "",
            &[
                "version",
                "model",
                "question",
                "max_model_len",
                "longest",
                "typical",
                "bytes_per_further_token",
                "bytes_per_further_token_all_ranks",
                "waste_share",
                "groups",
                "notes",
                "explanation",
            ][..],
        ),
        (
            "/model",
            &[
                "model_type",
                "architecture",
                "dtype",
                "num_layers",
                "max_len",
                "encoder_tokens",
            ],
        ),
        (
            "/question",
            &[
                "memory_bytes",
                "tensor_parallel",
                "pipeline_parallel",
                "kv_dtype",
                "block_size",
                "max_batched_tokens",
                "policy",
            ],
        ),
        (
            "/longest",
            &[
                "len",
                "requests",
                "tokens",
                "blocks_per_request",
                "bytes_per_request",
                "bytes_per_token",
            ],
        ),
        (
            "/groups/0",
            &[
                "kind",
                "layers",
                "block_size",
                "smallest_page_bytes",
                "largest_page_bytes",
                "bytes_per_block",
                "padding_bytes_per_block",
                "blocks_per_longest",
                "blocks_per_typical",
                "is_draft",
            ],
        ),
    ] {
        let object = answer.pointer(place).unwrap().as_object().unwrap();
        let mut own: Vec<&str> = object.keys().map(String::as_str).collect();
        let mut expected = keys.to_vec();
        own.sort_unstable();
        expected.sort_unstable();
        assert_eq!(own, expected, "{place}");
    }
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/cli.md");
    let document = std::fs::read_to_string(document).unwrap();
    for place in ["", "/model", "/question", "/longest", "/groups/0"] {
        for key in answer.pointer(place).unwrap().as_object().unwrap().keys() {
            assert!(
                document.contains(&format!("\"{key}\"")),
                "docs/cli.md lacks {key}"
            );
        }
    }
}

/// The blocks of docs/cli.md that begin with a command are what the command prints.
#[test]
fn the_document_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/cli.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut shown = 0;
    let mut current = String::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find("```\n$ kvpages ") {
        let (before, block) = rest.split_at(at);
        let (block, after) = block[4..].split_once("\n```\n").expect("a block ends");
        let command = block.lines().next().unwrap();
        let words = command["$ kvpages ".len()..].split_whitespace();
        let arguments: Vec<String> = words
            .map(|word| match word.strip_suffix("/config.json") {
                Some(name) => fixture(name),
                None => word.to_owned(),
            })
            .collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = said(&arguments);
        current.push_str(&format!(
            "{before}```\n{command}\n{}\n```\n",
            output.trim_end()
        ));
        rest = after;
        shown += 1;
    }
    current.push_str(rest);
    if std::env::var_os("KVPAGES_BLESS").is_some() {
        std::fs::write(path, &current).unwrap();
        return;
    }
    assert!(shown >= 2, "docs/cli.md shows {shown} commands");
    assert_eq!(
        text, current,
        "KVPAGES_BLESS=1 cargo test --features cli --test cli writes docs/cli.md anew"
    );
}

/// The table of docs/plans.md has the same models, from layers that were written down for it.
#[test]
fn plans_are_those_of_the_document() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/plans.md");
    let text = std::fs::read_to_string(path).unwrap();
    for (row, name, arguments) in [
        (
            "llama31_8b_tp1 | 55 GiB",
            "llama",
            &["--memory", "55GiB"][..],
        ),
        (
            "mixtral_8x7b_tp2 | 40 GiB",
            "mixtral",
            &["--memory", "40GiB", "--tp", "2"],
        ),
        (
            "gpt_oss_20b_tp1 | 50 GiB",
            "gpt_oss",
            &["--memory", "50GiB"],
        ),
        ("gemma4_26b | 40 GiB", "gemma4", &["--memory", "40GiB"]),
        (
            "gemma4_26b_fp8 | 40 GiB",
            "gemma4",
            &["--memory", "40GiB", "--kv-dtype", "fp8"],
        ),
        (
            "mimo_v2_flash_tp4 | 60 GiB",
            "mimo_v2_flash",
            &["--memory", "60GiB", "--tp", "4"],
        ),
        (
            "step_3.7_flash_tp2 | 50 GiB",
            "step3p7",
            &["--memory", "50GiB", "--tp", "2"],
        ),
        (
            "qwen3.5_35b_tp1 | 60 GiB",
            "qwen3_5_moe",
            &["--memory", "60GiB"],
        ),
        ("kimi_k2 | 60 GiB", "kimi_k2", &["--memory", "60GiB"]),
        (
            "glm_5.1_bf16 | 60 GiB",
            "glm_moe_dsa",
            &["--memory", "60GiB"],
        ),
        (
            "glm_5.1_fp8 | 60 GiB",
            "glm_moe_dsa",
            &["--memory", "60GiB", "--kv-dtype", "fp8"],
        ),
    ] {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("| {row} |")))
            .unwrap();
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let answer = json(name, arguments);
        for (cell, place) in [(3, "/typical/tokens"), (6, "/longest/tokens")] {
            let own = answer.pointer(place).unwrap().as_f64().unwrap();
            let other: f64 = cells[cell].parse().unwrap();
            // The table rounds to the nearest, the tool down.
            assert!((own - other).abs() <= 1.0, "{row}: {own} and {other}");
        }
    }
}

#[test]
fn lengths() {
    let own = json("qwen3", &["--memory", "40GiB"]);
    assert_eq!(own["max_model_len"], 40_960);
    let given = json("qwen3", &["--memory", "40GiB", "--max-model-len", "32Ki"]);
    assert_eq!(given["max_model_len"], 32_768);
    let fitted = json("qwen3", &["--memory", "4GiB", "--max-model-len", "auto"]);
    let longest = fitted["max_model_len"].as_u64().unwrap();
    assert!(longest < 40_960, "{longest}");
    assert_eq!(fitted["longest"]["requests"], 1.0);
    let error = refused(&["plan", &fixture("qwen3"), "--memory", "4GiB"], 1);
    for part in [
        "40960 tokens needs",
        &format!("--max-model-len {longest}"),
        "or auto",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let longer = plan("qwen3", &["--memory", "40GiB", "--max-model-len", "65536"]);
    assert!(longer.contains("more than the 40960 tokens"), "{longer}");
    let qwen3 = fixture("qwen3");
    let usual = [
        "plan",
        &qwen3,
        "--memory",
        "40GiB",
        "--typical-len",
        "40961",
    ];
    let error = refused(&usual, 1);
    assert!(error.contains("40961 is more than"), "{error}");
    refused(&["plan", &fixture("mamba2"), "--memory", "4GiB"], 1);
    plan("mamba2", &["--memory", "4GiB", "--max-model-len", "8192"]);
}

/// 2.9998 requests are not 3 of them, and a quotient that is whole loses no token.
#[test]
fn counts_are_rounded_down() {
    let arguments = ["--memory", "48GiB"];
    let answer = json("llama", &arguments);
    let requests = answer["longest"]["requests"].as_f64().unwrap();
    assert!(requests > 2.995 && requests < 3.0, "{requests}");
    let report = plan("llama", &arguments);
    let compared = plan("llama", &["--compare", "48GiB"]);
    let picture = plan("llama", &[&arguments[..], &["--map", "-"]].concat());
    assert!(
        report.contains(" 2.99 ") && !report.contains(" 3.00 "),
        "{report}"
    );
    assert!(
        compared.contains(" 2.99 ") && !compared.contains(" 3.00 "),
        "{compared}"
    );
    for part in [
        ">of longest requests, 131,072 tokens each: 2.99 fit<",
        ". 2.99 requests of",
    ] {
        assert!(picture.contains(part), "{part}");
    }
    let exact = json("glm_moe_dsa", &["--memory", "80GiB", "--kv-dtype", "f32"]);
    let blocks = exact["explanation"]["num_blocks"].as_u64().unwrap() - 1;
    let longest = &exact["longest"];
    let len = longest["len"].as_u64().unwrap();
    let of_one = longest["blocks_per_request"].as_u64().unwrap();
    assert_eq!(longest["tokens"], blocks * len / of_one);
    assert_eq!(blocks * len % of_one, 0);
}

/// A chosen backend plans only what its kernels read.
#[test]
fn layers_that_a_backend_cannot_read_are_refused() {
    let fits = |name: &str, backend: &str, kv: &str| {
        let config = fixture(name);
        let arguments = ["--memory", "200GiB", "-l", "4096", "--backend", backend];
        run(&[&["plan", &config, "--kv-dtype", kv], &arguments[..]].concat())
    };
    for (name, backend, kv, expected) in [
        (
            "mimo_v2_flash",
            "flash-attention-nhd",
            "auto",
            Some("keys and values of one width; the layer stores 192 and 128"),
        ),
        (
            "mimo_v2_flash",
            "hpc-attention",
            "fp8",
            Some("one width; the layer stores 192 and 128"),
        ),
        ("mimo_v2_flash", "flash-attention-diff-kv-hnd", "auto", None),
        ("mimo_v2_flash", "auto", "auto", None),
        (
            "llama",
            "flash-attention-nhd",
            "nvfp4",
            Some("no layout for nvfp4"),
        ),
        ("llama", "triton-hnd", "nvfp4", Some("no layout for nvfp4")),
        ("llama", "flash-infer-hnd", "nvfp4", None),
        ("llama", "auto", "nvfp4", None),
    ] {
        let output = fits(name, backend, kv);
        let stderr = String::from_utf8(output.stderr).unwrap();
        match expected {
            None => assert!(output.status.success(), "{name} on {backend}: {stderr}"),
            Some(why) => {
                assert_eq!(output.status.code(), Some(1), "{name} on {backend}");
                let named =
                    format!("layer model.layers.0.self_attn: kernels of the backend {backend}");
                assert!(stderr.contains(&named) && stderr.contains(why), "{stderr}");
            }
        }
    }
    // What the tool chooses itself reads every model in every type that the model takes.
    for name in every_fixture() {
        for kv in [
            "auto",
            "fp8",
            "fp8_per_token_head",
            "int4_per_token_head",
            "nvfp4",
        ] {
            let error = String::from_utf8(fits(&name, "auto", kv).stderr).unwrap();
            // No kernel reads nvfp4 where keys and values differ.
            let is_refused = name == "mimo_v2_flash" && kv == "nvfp4";
            assert_eq!(
                error.contains("cannot read"),
                is_refused,
                "{name} {kv}: {error}"
            );
        }
    }
}

/// Ranks without layers are neither in what is given nor in what is wasted.
#[test]
fn idle_ranks_waste_nothing() {
    let arguments = ["--memory", "40GiB", "--pp", "20"];
    let answer = json("nemotron_nas", &arguments);
    let workers = answer["explanation"]["workers"].as_array().unwrap();
    let (mut given, mut wasted, mut idle) = (0, 0, 0);
    for worker in workers {
        let ranks = worker["workers"].as_array().unwrap().len() as u64;
        match worker["num_tensors"].as_u64().unwrap() {
            0 => idle += ranks,
            _ => {
                given += ranks * worker["memory_bytes"].as_u64().unwrap();
                wasted += ranks * worker["wasted_bytes"]["total"].as_u64().unwrap();
            }
        }
    }
    assert_eq!(idle, 5);
    assert_eq!(answer["waste_share"], wasted as f64 / given as f64);
    let report = plan("nemotron_nas", &arguments);
    let line = report
        .lines()
        .find(|line| line.starts_with("stages 11, 12"));
    assert!(line.is_some_and(|line| line.ends_with(" idle")), "{report}");
}

#[test]
fn choices_change_the_plan() {
    let tokens = |name: &str, arguments: &[&str]| {
        let answer = json(name, &[&["--memory", "40GiB"], arguments].concat());
        answer["typical"]["tokens"].as_u64().unwrap()
    };
    let usual = tokens("gemma4", &[]);
    assert!(tokens("gemma4", &["--kv-dtype", "fp8"]) > 19 * usual / 10);
    assert!(tokens("gemma4", &["--max-batched-tokens", "512"]) > usual);
    assert!(tokens("gemma4", &["--tp", "2"]) > 19 * usual / 10);
    assert!(tokens("gemma4", &["--pp", "2"]) > 15 * usual / 10);
    let token_head = ["--kv-dtype", "fp8_per_token_head"];
    let reference = ["--kv-dtype", "fp8_per_token_head", "--policy", "reference"];
    assert!(tokens("gemma4", &token_head) > tokens("gemma4", &reference));
    assert!(tokens("jamba", &["--state-dtype", "f32"]) < tokens("jamba", &[]));
    assert!(tokens("deepseek_v3", &["--draft"]) < tokens("deepseek_v3", &[]));
    assert!(tokens("whisper", &["--encoder-tokens", "100"]) > tokens("whisper", &[]));
    let block = json("llama", &["--memory", "40GiB", "--block-size", "64"]);
    assert_eq!(block["groups"][0]["block_size"], 64);
    let hpc = json(
        "llama",
        &["--memory", "40GiB", "--backend", "hpc-attention"],
    );
    assert_eq!(hpc["groups"][0]["block_size"], 64);
    let explained = plan("llama", &["--memory", "40GiB", "--explain"]);
    assert!(
        explained.contains("beside the policy reference"),
        "{explained}"
    );
}

#[test]
fn several_plans_in_one_table() {
    let table = plan("llama", &["--compare", "8GiB,24GiB,48GiB"]);
    let rows: Vec<&str> = table
        .lines()
        .filter(|line| line.contains("bfloat16  "))
        .collect();
    assert_eq!(rows.len(), 3, "{table}");
    assert!(
        rows[0].contains("none") && rows[1].contains("1.49"),
        "{table}"
    );
    assert!(
        table.contains("bfloat16 at 8 GiB, tp 1: one request"),
        "{table}"
    );
    let all = json(
        "llama",
        &["--memory", "40GiB", "--compare", "bf16,fp8,tp=1,tp=2"],
    );
    let plans = all["plans"].as_array().unwrap();
    let asked = |plan: &Value| {
        let question = &plan["question"];
        (
            question["tensor_parallel"].as_u64().unwrap(),
            question["kv_dtype"].as_str().unwrap().to_owned(),
        )
    };
    let asked: Vec<_> = plans.iter().map(asked).collect();
    let expected = [(1, "bfloat16"), (1, "fp8"), (2, "bfloat16"), (2, "fp8")];
    assert_eq!(asked, expected.map(|(tp, kv)| (tp, kv.to_owned())));
    let mixed = json("llama", &["--compare", "1GiB,40GiB"]);
    assert!(
        mixed["plans"][0]["error"]
            .as_str()
            .unwrap()
            .contains("needs"),
        "{mixed}"
    );
    assert_eq!(mixed["plans"][1]["max_model_len"], 131_072);
    for plan in mixed["plans"].as_array().unwrap() {
        assert_eq!(plan["question"]["kv_dtype"], "bfloat16", "{mixed}");
    }
    // What is listed twice, or as another name of the same, is one line.
    let list = "24GiB,1GiB,24GiB,24576MiB,auto,bf16,fp8,fp8_e4m3,tp=2,tp=2";
    let twice = json("llama", &["--compare", list]);
    assert_eq!(twice["plans"].as_array().unwrap().len(), 4, "{twice}");
    let error = refused(&["plan", &fixture("llama"), "--compare", "1GiB,2GiB"], 1);
    assert!(
        error.contains("auto at 1 GiB, tp 1: one request")
            && error.contains("auto at 2 GiB, tp 1: one request"),
        "{error}"
    );
    // Each number of ranks has its own note.
    let copies = plan(
        "llama",
        &["--memory", "40GiB", "--compare", "tp=1,tp=16,tp=64"],
    );
    assert!(
        copies.contains("--tp 16 ranks: each is on 2") && copies.contains("64 ranks: each is on 8"),
        "{copies}"
    );
    refused(&["plan", &fixture("llama"), "--compare", "bf16,fp8"], 2);
    // Where lengths are fitted to the memory, each row says its own.
    let fitted = plan(
        "llama",
        &["--compare", "1GiB,40GiB", "--max-model-len", "auto"],
    );
    for part in ["longest  ", "usual  ", "of 8,176", "of 131,072", "of 8,192"] {
        assert!(fitted.contains(part), "{part}: {fitted}");
    }
    let error = refused(&["plan", &fixture("llama"), "--compare", "40GiB,odd"], 2);
    assert!(error.contains("odd"), "{error}");
}

#[test]
fn configs_from_elsewhere() {
    let text = std::fs::read_to_string(fixture("llama")).unwrap();
    let mut child = Command::new(TOOL)
        .args(["plan", "-", "--memory", "40GiB"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        plan("llama", &["--memory", "40GiB"])
    );
    // A folder as it is downloaded.
    let folder = std::env::temp_dir().join(format!("kvpages-cli-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("config.json"), text).unwrap();
    let from_folder = said(&["plan", folder.to_str().unwrap(), "--memory", "40GiB"]);
    std::fs::write(folder.join("config.json"), b"{\"model_type\": \"\xff\"}").unwrap();
    let error = refused(&["plan", folder.to_str().unwrap(), "--memory", "40GiB"], 2);
    assert!(error.contains("UTF-8"), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(from_folder, plan("llama", &["--memory", "40GiB"]));
}

/// Names in a config are text to a terminal, whatever they hold.
#[test]
fn a_config_commands_no_terminal() {
    let text = std::fs::read_to_string(fixture("llama")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["architectures"] = vec!["Odd\u{1b}[2J\u{9b}31m\u{ffff}"].into();
    let file = std::env::temp_dir().join(format!("kvpages-cli-{}.json", std::process::id()));
    let path = file.to_str().unwrap();
    std::fs::write(&file, config.to_string()).unwrap();
    let arguments = ["plan", path, "--memory", "40GiB"];
    let report = said(&arguments);
    let compared = said(&["plan", path, "--compare", "40GiB"]);
    let picture = said(&[&arguments[..], &["--map", "-"]].concat());
    let answer = said(&[&arguments[..], &["--json"]].concat());
    config["model_type"] = "odd\u{1b}]0;".into();
    config["num_key_value_heads"] = Value::Null;
    std::fs::write(&file, config.to_string()).unwrap();
    let error = refused(&arguments, 1);
    std::fs::remove_file(&file).unwrap();
    for text in [&report, &compared, &picture, &answer, &error] {
        let obeyed = |letter: char| letter.is_control() && letter != '\n';
        assert!(!text.contains(obeyed), "{text:?}");
    }
    assert!(report.contains("(Odd\\u001b[2J\\u009b31m"), "{report}");
    assert!(error.contains("odd\\u001b]0;"), "{error}");
    assert!(!picture.contains('\u{ffff}'), "{picture}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["model"]["architecture"], config["architectures"][0]);
}

/// Whatever never ends is read as far as any config goes.
#[cfg(unix)]
#[test]
fn a_stream_without_an_end_is_refused() {
    let error = refused(&["plan", "/dev/zero", "--memory", "40GiB"], 2);
    assert!(
        error.contains("/dev/zero: it has more than 64 MiB"),
        "{error}"
    );
}

#[test]
fn wrong_arguments_and_files() {
    let llama = fixture("llama");
    for (arguments, code, part) in [
        (&["plan", &llama][..], 2, "--memory"),
        (
            &["plan", &llama, "--memory", "40gigs"],
            2,
            "no unit of size",
        ),
        (&["plan", &llama, "--memory", "-40GiB"], 2, "negative"),
        (&["plan", &llama, "--memory", "0"], 2, "at least 1 byte"),
        (&["plan", &llama, "--memory", "lots"], 2, "no unit of size"),
        (&["plan", &llama, "--memory", "99999999999GiB"], 2, "63-bit"),
        (
            &["plan", &llama, "--memory", "40GiB", "--tp", "0"],
            2,
            "at least 1",
        ),
        (
            &["plan", &llama, "--memory", "40GiB", "--tp", "-1"],
            2,
            "negative",
        ),
        (
            &["plan", &llama, "--memory", "40GiB", "--kv-dtype", "fp9"],
            2,
            "known are auto",
        ),
        (
            &[
                "plan",
                &llama,
                "--memory",
                "40GiB",
                "--max-model-len",
                "all",
            ],
            2,
            "whole number",
        ),
        (
            &["plan", &llama, "--memory", "40GiB", "--backend", "flash"],
            2,
            "invalid value",
        ),
        (
            &["plan", &llama, "--memory", "40GiB", "--policy", "best"],
            2,
            "reference",
        ),
        (
            &["plan", &fixture("gemma3n"), "--memory", "9GiB", "--pp", "4"],
            1,
            "on another stage",
        ),
        (
            &["plan", "some/model", "--memory", "40GiB"],
            2,
            "nothing is downloaded",
        ),
        (
            &["plan", "/no/such/config.json", "--memory", "40GiB"],
            2,
            "/no/such/config.json",
        ),
        (
            &[
                "plan",
                concat!(env!("CARGO_MANIFEST_DIR"), "/README.md"),
                "--memory",
                "1GiB",
            ],
            2,
            "not JSON",
        ),
        (&["plan", "-", "--memory", "40GiB"], 2, "empty"),
        (
            &["plan", &llama, "--memory", "40GiB", "--map", "-", "--json"],
            2,
            "both write to standard output",
        ),
        (&["plan"], 2, "CONFIG"),
        (&["paln"], 2, "plan"),
        (&[], 2, "Usage"),
        (&["plan", &llama, "--memory", "40GiB", "--tp", "3"], 1, "3"),
        (
            &["plan", &llama, "--memory", "40GiB", "--pp", "33"],
            1,
            "--pp 33",
        ),
        (
            &["plan", &llama, "--memory", "40GiB", "--draft"],
            1,
            "draft",
        ),
        (
            &["plan", &llama, "--memory", "40GiB", "--block-size", "24"],
            1,
            "FLASH_ATTN",
        ),
        (&["plan", &llama, "--memory", "1"], 1, "needs"),
        (
            &["plan", &llama, "--memory", "40GiB", "-b", "1048576"],
            1,
            "no length fits: give more memory, or less of --block-size",
        ),
        (
            &[
                "plan",
                &llama,
                "--memory",
                "40GiB",
                "-l",
                "9223372036854775807",
            ],
            2,
            "'--max-model-len <TOKENS|auto>': it must be at most 1,099,511,627,776",
        ),
        (
            &["plan", &llama, "--memory", "1", "--max-model-len", "auto"],
            1,
            "no length fits",
        ),
        (
            &["plan", &fixture("unknown_states"), "--memory", "40GiB"],
            1,
            "mamba_every",
        ),
        (
            &[
                "plan",
                &fixture("deepseek_v4"),
                "--memory",
                "40GiB",
                "--block-size",
                "16",
            ],
            1,
            "--block-size",
        ),
        (
            &[
                "plan",
                &fixture("deepseek_v3"),
                "--memory",
                "40GiB",
                "--kv-dtype",
                "nvfp4",
            ],
            1,
            "latents",
        ),
        (
            &[
                "plan",
                &llama,
                "--memory",
                "40GiB",
                "--map",
                "/no/such/folder/map.svg",
            ],
            2,
            "--map",
        ),
    ] {
        let error = refused(arguments, code);
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}

#[test]
fn help_and_completions() {
    let help = said(&["plan", "--help"]);
    for part in ["Examples:", "Exit codes:", "--compare", "weights", "80GiB"] {
        assert!(help.contains(part), "{part}: {help}");
    }
    assert!(said(&["--version"]).contains(env!("CARGO_PKG_VERSION")));
    for shell in ["bash", "zsh", "fish"] {
        let script = said(&["completions", shell]);
        assert!(script.contains("max-model-len"), "{shell}");
    }
}

/// What a start tag of the picture says of an attribute.
fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let start = tag.find(&format!(" {name}=\""))? + name.len() + 3;
    tag[start..].split('"').next()
}

fn number(tag: &str, name: &str) -> f64 {
    let text = attribute(tag, name).unwrap_or_else(|| panic!("{tag} has no {name}"));
    text.parse().unwrap_or_else(|_| panic!("{tag}: {name}"))
}

/// Tags in order, with every opened element closed.
fn tags(picture: &str) -> Vec<&str> {
    let mut open = Vec::new();
    let mut tags = Vec::new();
    for part in picture.split('<').skip(1) {
        let (tag, text) = part.split_once('>').expect("a tag ends");
        assert!(!text.contains('&') || text.contains(';'), "{text}");
        if tag.starts_with('?') || tag.ends_with('/') {
        } else if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else {
            open.push(tag.split_whitespace().next().unwrap());
        }
        tags.push(tag);
    }
    assert!(open.is_empty(), "{open:?}");
    tags
}

/// Rectangles are inside the picture, and those of each bar are as wide as their bytes and add up.
#[test]
fn the_map_is_true_to_scale() {
    for (name, arguments) in [
        ("llama", &["--memory", "40GiB"][..]),
        ("gemma4", &["--memory", "40GiB"]),
        ("gemma4", &["--memory", "40GiB", "--pp", "3"]),
        ("qwen3_5_moe", &["--memory", "40GB"]),
        ("deepseek_v4", &["--memory", "40GiB", "--kv-dtype", "fp8"]),
        ("deepseek_v32", &["--memory", "40GiB", "--kv-dtype", "fp8"]),
        ("nemotron_h", &["--memory", "7_000_000_001"]),
        ("whisper", &["--memory", "2GiB"]),
        ("gemma3n", &["--memory", "2GiB"]),
    ] {
        let picture = plan(name, &[arguments, &["--map", "-"]].concat());
        let memory = json(name, arguments)["question"]["memory_bytes"]
            .as_u64()
            .unwrap();
        let tags = tags(&picture);
        let svg = tags.iter().find(|tag| tag.starts_with("svg")).unwrap();
        let (width, height) = (number(svg, "width"), number(svg, "height"));
        let mut bars = 0;
        let mut bytes = None;
        for tag in &tags {
            if tag.starts_with("rect") && attribute(tag, "x").is_some() {
                let (x, y) = (number(tag, "x"), number(tag, "y"));
                assert!(
                    x >= 0.0 && x + number(tag, "width") <= width + 0.1,
                    "{name}: {tag}"
                );
                assert!(
                    y >= 0.0 && y + number(tag, "height") <= height + 0.1,
                    "{name}: {tag}"
                );
            }
            if tag.starts_with("text") {
                assert!(
                    number(tag, "x") <= width && number(tag, "y") <= height,
                    "{name}: {tag}"
                );
            }
            if tag.starts_with("g id=\"bar-") {
                bytes = Some(0);
            }
            if let (Some(sum), Some(own)) = (bytes.as_mut(), attribute(tag, "data-bytes")) {
                let own: u64 = own.parse().unwrap();
                *sum += own;
                let drawn = number(tag, "width") / (width - 72.0) * memory as f64;
                let dot = memory as f64 / (width - 72.0);
                assert!((drawn - own as f64).abs() <= dot, "{name}: {tag}");
            }
            if *tag == "/g" {
                assert_eq!(bytes.take(), Some(memory), "{name}");
                bars += 1;
            }
        }
        assert!(bars >= 1, "{name}");
    }
}

#[test]
fn the_map_in_the_documents_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/gemma4.svg");
    let picture = plan(
        "gemma4",
        &[
            "--memory",
            "40GiB",
            "--kv-dtype",
            "fp8_per_token_head",
            "--map",
            "-",
        ],
    );
    if std::env::var_os("KVPAGES_BLESS").is_some() {
        std::fs::write(path, &picture).unwrap();
    }
    assert!(
        std::fs::read_to_string(path).unwrap() == picture,
        "KVPAGES_BLESS=1 writes docs/gemma4.svg anew"
    );
}
