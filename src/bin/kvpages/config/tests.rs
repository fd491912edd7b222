use std::collections::BTreeSet;

use kvpages::dtype::Dtype;
use serde_json::Value;

use crate::build::{self, Backends, Choices, KvType};

use super::{Described, Part, Reach, Store, Wishes, read};

const WISHES: Wishes = Wishes {
    tensor_parallel: 1,
    draft: false,
    state_dtype: None,
    encoder_tokens: None,
};

fn fixture(name: &str) -> String {
    let path = format!(
        "{}/tests/cli/configs/{name}.json",
        env!("CARGO_MANIFEST_DIR")
    );
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn described(name: &str, tensor_parallel: u64) -> Described {
    let wishes = Wishes {
        tensor_parallel,
        ..WISHES
    };
    read(&fixture(name), &wishes).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn store_text(store: &Store) -> String {
    let reach_text = |reach: &Reach| match reach {
        Reach::Full => "full".to_owned(),
        Reach::Window(tokens) => format!("window {tokens}"),
        Reach::Chunk(tokens) => format!("chunk {tokens}"),
        Reach::Encoder => "encoder".to_owned(),
    };
    match store {
        Store::KeyValue {
            reach,
            heads,
            key,
            value,
        } if key == value => {
            format!("{} {heads}x{key}", reach_text(reach))
        }
        Store::KeyValue {
            reach,
            heads,
            key,
            value,
        } => {
            format!("{} {heads}x{key}+{value}", reach_text(reach))
        }
        Store::Latent {
            width,
            sparse: false,
        } => format!("latent {width}"),
        Store::Latent {
            width,
            sparse: true,
        } => format!("sparse latent {width}"),
        Store::Indexer { bytes } => format!("indexer {bytes}"),
        Store::Compressed {
            part,
            width,
            tokens,
        } => {
            let part = match part {
                Part::Main => "main",
                Part::Window => "swa",
                Part::Compressor => "compressor",
                Part::Indexer => "indexer",
                Part::IndexerCompressor => "indexer compressor",
            };
            format!("{part} {width}/{tokens}")
        }
        Store::State { kind, states } => {
            let states: Vec<String> = states
                .iter()
                .map(|(dtype, dims)| format!("{dtype}{dims:?}").replace(' ', ""))
                .collect();
            format!("{} {}", kind.name(), states.join(" "))
        }
    }
}

/// Layers that store the same, counted, in the order in which they come first.
fn summary(described: &Described) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for layer in &described.layers {
        let text = match layer.shares_with {
            Some(_) => "shares".to_owned(),
            None => store_text(&layer.store),
        };
        match counts.iter_mut().find(|(known, _)| *known == text) {
            Some((_, count)) => *count += 1,
            None => counts.push((text, 1)),
        }
    }
    let texts: Vec<String> = counts
        .iter()
        .map(|(text, count)| format!("{count} {text}"))
        .collect();
    texts.join("; ")
}

#[test]
fn layers_of_every_family() {
    for (name, ranks, expected) in [
        ("llama", 1, "32 full 8x128"),
        ("llama", 8, "32 full 1x128"),
        ("llama", 16, "32 full 1x128"),
        ("qwen3", 2, "64 full 4x128"),
        ("qwen3_moe", 8, "94 full 1x128"),
        ("qwen3_vl", 1, "36 full 8x128"),
        ("qwen2_windows", 1, "21 full 4x128; 7 window 4096 4x128"),
        ("mixtral", 2, "32 full 4x128"),
        ("mistral", 1, "32 window 4096 8x128"),
        ("mistral_full", 1, "32 full 8x128"),
        ("phi4", 2, "40 full 5x128"),
        ("phi4_mini", 1, "32 full 8x128"),
        ("gpt_oss", 1, "12 window 128 8x64; 12 full 8x64"),
        ("gemma2", 1, "21 window 4096 8x256; 21 full 8x256"),
        ("gemma3", 2, "52 window 1024 8x128; 10 full 8x128"),
        ("gemma3_few_fields", 1, "29 window 1024 4x256; 5 full 4x256"),
        ("gemma3n", 1, "16 window 512 2x256; 4 full 2x256; 15 shares"),
        ("gemma4", 1, "25 window 1024 8x256; 5 full 2x512"),
        ("gemma4", 4, "25 window 1024 2x256; 5 full 1x512"),
        (
            "mimo_v2_flash",
            4,
            "9 full 1x192+128; 39 window 128 2x192+128",
        ),
        ("step3p7", 2, "12 full 4x128; 33 window 512 4x128"),
        ("olmo3", 2, "48 window 4096 4x128; 16 full 4x128"),
        ("cohere2", 4, "48 window 4096 2x128; 16 full 2x128"),
        ("exaone4", 1, "48 window 4096 8x128; 16 full 8x128"),
        ("llama4", 8, "36 chunk 8192 1x128; 12 full 1x128"),
        ("minimax_m2", 4, "62 full 2x128"),
        ("nemotron_nas", 2, "49 full 4x128"),
        ("falcon", 1, "32 full 1x64"),
        ("gpt2", 1, "12 full 12x64"),
        ("deepseek_v3", 8, "61 latent 576"),
        ("kimi_k2", 1, "61 latent 576"),
        ("longcat_flash", 8, "56 latent 576"),
        ("deepseek_v32", 8, "61 sparse latent 576; 61 indexer 132"),
        ("glm_moe_dsa", 1, "78 sparse latent 576; 78 indexer 132"),
        (
            "deepseek_v4",
            8,
            "43 swa 512/128; 21 main 512/4; 21 compressor 2048/8; 21 indexer 132/4; \
             21 indexer compressor 512/8; 20 main 512/128; 20 compressor 1024/128",
        ),
        (
            "qwen3_5_moe",
            2,
            "30 gdn bfloat16[3,4096] float32[16,128,128]; 10 full 1x256",
        ),
        (
            "qwen3_next",
            4,
            "36 gdn bfloat16[3,2048] bfloat16[8,128,128]; 12 full 1x256",
        ),
        (
            "kimi_k3",
            8,
            "69 linear bfloat16[3,1536] bfloat16[3,1536] bfloat16[3,1536] float32[12,128,128]; 24 latent 576",
        ),
        (
            "kimi_linear",
            4,
            "20 linear bfloat16[3,1024] bfloat16[3,1024] bfloat16[3,1024] float32[8,128,128]; 7 latent 576",
        ),
        (
            "nemotron_h",
            4,
            "54 mamba2 bfloat16[3,5120] bfloat16[64,64,256]; 10 full 2x128",
        ),
        (
            "nemotron3",
            1,
            "23 mamba2 bfloat16[3,6144] float32[64,64,128]; 6 full 2x128",
        ),
        // 8 groups on 16 ranks: each rank has a copy of one.
        (
            "nemotron3",
            16,
            "23 mamba2 bfloat16[3,512] float32[4,64,128]; 6 full 1x128",
        ),
        (
            "jamba",
            1,
            "28 mamba1 bfloat16[3,8192] bfloat16[8192,16]; 4 full 8x128",
        ),
        (
            "bamba",
            1,
            "29 mamba2 bfloat16[3,8448] bfloat16[128,64,128]; 3 full 8x128",
        ),
        (
            "falcon_h1",
            1,
            "32 full 8x128; 32 mamba2 bfloat16[3,1536] bfloat16[128,8,256]",
        ),
        (
            "granitemoehybrid",
            1,
            "36 mamba2 bfloat16[3,8448] bfloat16[128,64,128]; 4 full 8x128",
        ),
        ("lfm2", 1, "10 short_conv bfloat16[2,2048]; 6 full 8x64"),
        (
            "minimax_text_01",
            8,
            "70 linear float32[8,128,128]; 10 full 1x128",
        ),
        (
            "mamba2",
            1,
            "64 mamba2 bfloat16[3,10240] bfloat16[128,64,128]",
        ),
        ("whisper", 1, "32 full 20x64; 32 encoder 20x64"),
        ("bart", 4, "12 full 4x64; 12 encoder 4x64"),
        ("unknown_plain", 1, "4 full 8x128"),
    ] {
        assert_eq!(
            summary(&described(name, ranks)),
            expected,
            "{name} on {ranks}"
        );
    }
}

#[test]
fn drafts_come_when_they_are_asked_for() {
    for (name, expected) in [
        ("deepseek_v3", Some("62 latent 576")),
        ("qwen3_5_moe", Some("11 full 2x256")),
        ("deepseek_v4", Some("44 swa 512/128")),
        ("minimax_m2", Some("65 full 8x128")),
        ("step3p7", Some("15 full 8x128")),
        ("llama", None),
        ("kimi_k2", None),
    ] {
        let wishes = Wishes {
            draft: true,
            ..WISHES
        };
        match (read(&fixture(name), &wishes), expected) {
            (Ok(described), Some(expected)) => {
                assert!(
                    summary(&described).contains(expected),
                    "{name}: {}",
                    summary(&described)
                );
                assert!(described.layers.last().unwrap().is_draft, "{name}");
            }
            (Err(error), None) => assert!(error.0.contains("num_nextn_predict_layers"), "{error}"),
            (other, _) => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn what_is_assumed_is_noted() {
    for (name, expected) in [
        ("llama", "head_dim is not given"),
        ("gpt_oss", "bfloat16 is assumed"),
        (
            "gemma3_few_fields",
            "text_config.num_key_value_heads is not given: 4, the default of gemma3_text's",
        ),
        ("falcon_h1", "no type of the recurrent states is given"),
        ("phi4_mini", "windows of 262144 tokens are not shorter"),
        ("mistral", "holds for all layers"),
        ("unknown_plain", "model_type brand_new is not known here"),
    ] {
        let notes = described(name, 1).notes;
        assert!(
            notes.iter().any(|note| note.contains(expected)),
            "{name}: {notes:?}"
        );
    }
    assert!(described("qwen3", 1).notes.is_empty());
    let yarn = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}"#;
    let fp8 =
        r#"{"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}"#;
    for (field, value, expected) in [
        ("rope_scaling", yarn, "from 40960 to 131072 tokens"),
        ("quantization_config", fp8, "the cache is quantised too"),
    ] {
        let value = serde_json::from_str(value).unwrap();
        let notes = read(&changed("qwen3", field, Some(value)), &WISHES)
            .unwrap()
            .notes;
        assert!(
            notes.iter().any(|note| note.contains(expected)),
            "{field}: {notes:?}"
        );
    }
    let copies = described("llama", 16).notes;
    assert!(
        copies
            .iter()
            .any(|note| note.contains("each is on 2 of them")),
        "{copies:?}"
    );
}

#[test]
fn lengths_and_encoders() {
    for (name, longest, encoder) in [
        ("llama", Some(131_072), 0),
        ("gemma3", Some(131_072), 0),
        ("kimi_linear", Some(1_048_576), 0),
        ("whisper", Some(448), 1500),
        ("bart", Some(1024), 1024),
        ("mamba2", None, 0),
    ] {
        let described = described(name, 1);
        assert_eq!(
            (described.max_len, described.encoder_tokens),
            (longest, encoder),
            "{name}"
        );
    }
}

/// Cohere says of its own how long sequences may be; others have what they were trained with.
#[test]
fn lengths_that_other_fields_change() {
    let plain = r#""hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 4, "max_position_embeddings": 8192, "dtype": "bfloat16""#;
    let own = r#""model_max_length": 132096"#;
    let cohere = format!(r#"{{"model_type": "cohere", {plain}, {own}}}"#);
    let aya = format!(
        r#"{{"model_type": "aya_vision", "text_config": {{"model_type": "cohere2", {plain}, {own}}}}}"#
    );
    let llama = format!(r#"{{"model_type": "llama", {plain}, {own}}}"#);
    for (text, expected) in [(cohere, 132_096), (aya, 132_096), (llama, 8192)] {
        let described = read(&text, &WISHES).unwrap();
        assert_eq!(described.max_len, Some(expected), "{text}");
    }
    for (family, scaling, expected) in [
        (
            "llama",
            r#"{"type": "linear", "factor": 4.0}"#,
            Some(32_768),
        ),
        (
            "llama",
            r#"{"rope_type": "dynamic", "factor": 2}"#,
            Some(16_384),
        ),
        (
            "llama",
            r#"{"rope_type": "linear", "factor": 8, "original_max_position_embeddings": 2048}"#,
            Some(16_384),
        ),
        (
            "llama",
            r#"{"rope_type": "linear", "factor": 4, "original_max_position_embeddings": 2048}"#,
            None,
        ),
        ("llama", r#"{"rope_type": "llama3", "factor": 8}"#, None),
        (
            "gemma3_text",
            r#"{"rope_type": "linear", "factor": 8}"#,
            None,
        ),
    ] {
        let text = format!(r#"{{"model_type": "{family}", {plain}, "rope_scaling": {scaling}}}"#);
        let described = read(&text, &WISHES).unwrap();
        assert_eq!(described.max_len, Some(8192), "{text}");
        let notes = described.notes.join("\n");
        match expected {
            Some(tokens) => assert!(
                notes.contains(&format!("from 8192 to {tokens} tokens")),
                "{notes}"
            ),
            None => assert!(!notes.contains("may stretch"), "{notes}"),
        }
    }
}

/// A fixture with a field set to another value; with none, left out.
fn changed(name: &str, field: &str, value: Option<Value>) -> String {
    let mut config: Value = serde_json::from_str(&fixture(name)).unwrap();
    set(&mut config, field, value);
    config.to_string()
}

fn set(config: &mut Value, field: &str, value: Option<Value>) {
    let mut object = config.as_object_mut().unwrap();
    let mut last = field;
    while let Some((outer, rest)) = last.split_once('.') {
        object = object[outer].as_object_mut().unwrap();
        last = rest;
    }
    match value {
        Some(value) => object.insert(last.to_owned(), value),
        None => object.remove(last),
    };
}

#[test]
fn refusals_name_the_field() {
    let number = |number: i64| Some(Value::from(number));
    for (name, field, value, expected) in [
        ("llama", "model_type", None, "no model_type"),
        (
            "llama",
            "num_hidden_layers",
            None,
            "num_hidden_layers is missing",
        ),
        (
            "llama",
            "num_attention_heads",
            None,
            "num_attention_heads is missing",
        ),
        ("llama", "hidden_size", None, "hidden_size is missing"),
        ("llama", "hidden_size", number(4097), "head_dim"),
        (
            "llama",
            "num_key_value_heads",
            number(-8),
            "num_key_value_heads is -8",
        ),
        (
            "llama",
            "num_key_value_heads",
            number(0),
            "num_key_value_heads is 0",
        ),
        (
            "llama",
            "num_key_value_heads",
            Some("eight".into()),
            "num_key_value_heads",
        ),
        ("llama", "num_hidden_layers", number(1 << 40), "at most"),
        (
            "llama",
            "torch_dtype",
            Some("int7".into()),
            "torch_dtype is \"int7\"",
        ),
        ("llama", "torch_dtype", number(16), "torch_dtype is 16"),
        (
            "gemma4",
            "text_config.dtype",
            Some(vec!["bfloat16"].into()),
            "text_config.dtype is [\"bfloat16\"]",
        ),
        (
            "gpt_oss",
            "sliding_window",
            None,
            "sliding_window is missing",
        ),
        (
            "gpt_oss",
            "layer_types",
            Some(vec!["full_attention"].into()),
            "has 1 entries",
        ),
        (
            "gpt_oss",
            "layer_types",
            Some(vec!["odd"; 24].into()),
            "layer_types[0]",
        ),
        (
            "deepseek_v3",
            "qk_rope_head_dim",
            None,
            "qk_rope_head_dim is missing",
        ),
        (
            "deepseek_v4",
            "compress_ratios",
            Some(vec![3; 44].into()),
            "ratios known here",
        ),
        (
            "deepseek_v4",
            "compress_ratios",
            Some(vec![4; 3].into()),
            "has 3 entries",
        ),
        ("deepseek_v4", "head_dim", None, "head_dim is missing"),
        (
            "deepseek_v4",
            "sliding_window",
            None,
            "sliding_window is missing",
        ),
        (
            "kimi_k3",
            "text_config.linear_attn_config.kda_layers",
            None,
            "kda_layers is missing",
        ),
        (
            "kimi_k3",
            "text_config.linear_attn_config.num_heads",
            None,
            "num_heads is missing",
        ),
        (
            "nemotron3",
            "ssm_state_size",
            None,
            "ssm_state_size is missing",
        ),
        (
            "nemotron3",
            "hybrid_override_pattern",
            Some("MX".into()),
            "letter X",
        ),
        (
            "nemotron3",
            "hybrid_override_pattern",
            Some("-E".into()),
            "has 2 entries",
        ),
        (
            "nemotron_nas",
            "block_configs",
            Some(Value::Array(Vec::new())),
            "has 0 entries",
        ),
        (
            "gemma3n",
            "text_config.num_kv_shared_layers",
            number(35),
            "num_kv_shared_layers is 35",
        ),
        ("bart", "d_model", None, "d_model is missing"),
        ("bart", "max_position_embeddings", None, "--encoder-tokens"),
        ("unknown_states", "x", None, "mamba_every"),
        (
            "unknown_plain",
            "sliding_window",
            number(512),
            "nothing says which layers",
        ),
        (
            "unknown_plain",
            "num_hidden_layers",
            None,
            "num_hidden_layers is missing",
        ),
        (
            "unknown_plain",
            "num_key_value_heads",
            None,
            "num_key_value_heads is missing",
        ),
    ] {
        let text = changed(name, field, value);
        match read(&text, &WISHES) {
            Ok(described) => panic!("{name} with another {field}: {}", summary(&described)),
            Err(error) => assert!(error.0.contains(expected), "{name}, {field}: {error}"),
        }
    }
    let three = Wishes {
        tensor_parallel: 3,
        ..WISHES
    };
    for name in ["llama", "qwen3_5_moe", "jamba", "lfm2", "minimax_text_01"] {
        assert!(read(&fixture(name), &three).is_err(), "{name} on 3 ranks");
    }
}

/// A list of kinds does not say whose keys and values layers read, nor how often they run.
#[test]
fn what_no_list_of_kinds_answers_is_refused() {
    for family in ["brand_new", "llama"] {
        let text = |more: &str| {
            format!(
                r#"{{"model_type": "{family}", "hidden_size": 4096, "num_attention_heads": 32, "dtype": "bfloat16",
                "num_key_value_heads": 8, "num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"]
                {more}}}"#
            )
        };
        for field in [
            "cla_share_factor",
            "kv_sharing",
            "shared_kv_layers",
            "yoco_start",
            "cross_layer_kv",
            "kv_compression",
            "compress_ratio",
            "total_ut_steps",
            "num_loops",
        ] {
            for value in ["2", "true", "[0, 1]", "\"all\""] {
                let text = text(&format!(", \"{field}\": {value}"));
                let error = read(&text, &WISHES).unwrap_err();
                assert!(error.0.contains(field), "{family}, {field}: {error}");
            }
            for value in ["null", "false", "0", "1", "1.0", "[]"] {
                let text = text(&format!(", \"{field}\": {value}"));
                let described = read(&text, &WISHES);
                assert!(described.is_ok(), "{family}, {field} {value}");
            }
        }
        // Hunyuan's files have it beside what turns it off.
        let off = text(", \"use_cla\": false, \"cla_share_factor\": 2");
        assert_eq!(summary(&read(&off, &WISHES).unwrap()), "2 full 8x128");
        let notes = read(&text(""), &WISHES).unwrap().notes.join("\n");
        let is_noted = notes.contains("model_type brand_new is not known here");
        assert_eq!(is_noted, family == "brand_new", "{notes}");
        // Gemma's rule, which is not everybody's.
        let shared = read(&text(", \"num_kv_shared_layers\": 1"), &WISHES);
        assert_eq!(shared.is_err(), family == "brand_new");
    }
}

/// What lists of layers and of 0 and 1 say beyond the layers is no layer that is passed over.
#[test]
fn lists_that_say_more_than_there_is_are_refused() {
    let mllama = r#"{"model_type": "mllama", "text_config": {"model_type": "mllama_text_model", "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 4, "dtype": "bfloat16",
        "cross_attention_layers": LIST}}"#;
    for (list, expected) in [
        (
            "[1, 4]",
            "text_config.cross_attention_layers has layer 4, but layers are numbered 0 to 3",
        ),
        (
            "[1, 3, 1]",
            "text_config.cross_attention_layers has layer 1 twice",
        ),
    ] {
        let error = read(&mllama.replace("LIST", list), &WISHES).unwrap_err();
        assert!(error.0.contains(expected), "{list}: {error}");
    }
    let full = "linear_attn_config.full_attn_layers";
    let bits = |count: usize, other: u64| -> Vec<u64> {
        let mut bits = vec![1; count];
        bits[2] = other;
        bits
    };
    for (name, field, list, expected) in [
        (
            "bamba",
            "attn_layer_indices",
            vec![9, 32],
            "has layer 32, but layers are numbered 0 to 31",
        ),
        (
            "bamba",
            "attn_layer_indices",
            vec![9, 9],
            "has layer 9 twice",
        ),
        (
            "lfm2",
            "full_attn_idxs",
            vec![2, 16],
            "has layer 16, but layers are numbered 0 to 15",
        ),
        (
            "kimi_linear",
            full,
            vec![4, 28],
            "has layer 28, but layers are numbered 1 to 27",
        ),
        (
            "kimi_linear",
            full,
            vec![0],
            "has layer 0, but layers are numbered 1 to 27",
        ),
        ("kimi_linear", full, vec![4, 4], "has layer 4 twice"),
        (
            "mimo_v2_flash",
            "hybrid_layer_pattern",
            bits(48, 2),
            "[2] is 2; it must be 0 or 1",
        ),
        (
            "minimax_text_01",
            "attn_type_list",
            bits(80, 7),
            "[2] is 7; it must be 0 or 1",
        ),
        (
            "llama4",
            "text_config.no_rope_layers",
            bits(48, 3),
            "[2] is 3; it must be 0 or 1",
        ),
    ] {
        let error = read(&changed(name, field, Some(list.into())), &WISHES).unwrap_err();
        let expected = format!(
            "{field}{}{expected}",
            if expected.starts_with('[') { "" } else { " " }
        );
        assert!(error.0.contains(&expected), "{name}, {expected}: {error}");
    }
    for (offset, is_read) in [(7, true), (8, false)] {
        let text = changed("jamba", "attn_layer_offset", Some(offset.into()));
        match (read(&text, &WISHES), is_read) {
            (Ok(_), true) => {}
            (Err(error), false) => {
                let expected = "attn_layer_offset is 8; it must be less than attn_layer_period, 8";
                assert!(error.0.contains(expected), "{error}");
            }
            (other, _) => panic!("{offset}: {other:?}"),
        }
    }
}

/// Yes and no are as strict as numbers, and null is a field left out.
#[test]
fn what_is_no_yes_or_no_is_refused() {
    for (name, field, other) in [
        ("mistral", "use_sliding_window", "false"),
        ("llama", "use_cla", "yes"),
        ("gpt2", "multi_query", "true"),
        ("falcon", "new_decoder_architecture", "1"),
        ("llama", "multi_query_attention", "1"),
        ("llama", "add_cross_attention", "1"),
        ("bart", "is_encoder_decoder", "1"),
        ("deepseek_v3", "use_mla", "no"),
        ("gemma4", "text_config.attention_k_eq_v", "true"),
    ] {
        let text = changed(name, field, Some(other.into()));
        let error = read(&text, &WISHES).unwrap_err();
        let expected = format!("{field} is \"{other}\"; it must be true or false");
        assert!(error.0.contains(&expected), "{name}, {field}: {error}");
        let number = changed(name, field, Some(1.into()));
        assert!(read(&number, &WISHES).is_err(), "{name}, {field}");
        let null = read(&changed(name, field, Some(Value::Null)), &WISHES);
        let left_out = read(&changed(name, field, None), &WISHES);
        assert_eq!(
            null.map(|described| summary(&described)),
            left_out.map(|described| summary(&described)),
            "{name}, {field}"
        );
    }
    let mut config: Value = serde_json::from_str(&fixture("nemotron_nas")).unwrap();
    config["block_configs"][3]["attention"]["no_op"] = "true".into();
    let error = read(&config.to_string(), &WISHES).unwrap_err();
    let expected = "block_configs[3].attention.no_op is \"true\"; it must be true or false";
    assert!(error.0.contains(expected), "{error}");
    let beside = r#"{"model_type": "vision-encoder-decoder", "is_encoder_decoder": "true", "encoder": {},
        "decoder": {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}}"#;
    let error = read(beside, &WISHES).unwrap_err();
    assert!(error.0.contains("is_encoder_decoder is"), "{error}");
}

/// So are texts: a list in place of letters is not passed over.
#[test]
fn what_is_no_text_is_refused() {
    for (name, field) in [
        ("nemotron3", "hybrid_override_pattern"),
        ("nemotron3", "mamba_ssm_cache_dtype"),
        ("gpt2", "attention_head_type"),
    ] {
        let text = changed(name, field, Some(vec!["M"].into()));
        let error = read(&text, &WISHES).unwrap_err();
        let expected = format!("{field} is [\"M\"]; it must be a text");
        assert!(error.0.contains(&expected), "{name}, {field}: {error}");
    }
}

/// Files as they are published, shortened to the fields that decide.
#[test]
fn fields_as_they_are_published() {
    let falcon = r#""hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32"#;
    let mpt = r#""model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048"#;
    let grok = r#""num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128"#;
    for (text, expected) in [
        // The class writes num_kv_heads beside multi_query, which decides.
        (
            format!(
                r#"{{"model_type": "falcon", {falcon}, "multi_query": true, "num_kv_heads": 71}}"#
            ),
            "32 full 1x64",
        ),
        (
            r#"{"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60,
                "multi_query": true, "new_decoder_architecture": true, "num_kv_heads": 8}"#
                .to_owned(),
            "60 full 8x64",
        ),
        // So does the class's default, where the field is left out.
        (
            format!(r#"{{"model_type": "falcon", {falcon}, "num_kv_heads": 71}}"#),
            "32 full 1x64",
        ),
        (
            format!(r#"{{"model_type": "falcon", {falcon}, "multi_query": false}}"#),
            "32 full 71x64",
        ),
        (
            format!(r#"{{"model_type": "falcon", {falcon}, "new_decoder_architecture": true}}"#),
            "32 full 71x64",
        ),
        (
            r#"{"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40}"#.to_owned(),
            "40 full 1x128",
        ),
        (
            format!(r#"{{{mpt}, "attn_config": {{"attn_type": "multiquery_attention"}}}}"#),
            "32 full 1x128",
        ),
        (
            format!(
                r#"{{{mpt}, "attn_config": {{"attn_type": "grouped_query_attention", "kv_n_heads": 8}}}}"#
            ),
            "32 full 8x128",
        ),
        (
            format!(r#"{{{mpt}, "attn_config": {{"attn_type": "multihead_attention"}}}}"#),
            "32 full 32x128",
        ),
        (
            format!(
                r#"{{"model_type": "git", {grok}, "global_attn_every_n": 1, "sliding_window_size": -1}}"#
            ),
            "64 full 8x128",
        ),
        (
            r#"{"model_type": "deci", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 3,
                "num_key_value_heads_per_layer": [4, 2, 4]}"#
                .to_owned(),
            "2 full 4x128; 1 full 2x128",
        ),
        (
            r#"{"model_type": "phi3_v", "hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 32,
                "num_key_value_heads": 32, "sliding_window": 262144, "max_position_embeddings": 131072}"#
                .to_owned(),
            "32 full 32x96",
        ),
        (
            r#"{"model_type": "gpt2", "n_embd": 2048, "n_head": 16, "n_layer": 24, "attention_head_type": "multiquery"}"#
                .to_owned(),
            "24 full 1x128",
        ),
        (
            r#"{"model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 28,
                "kv_channels": 128, "multi_query_attention": true, "multi_query_group_num": 2}"#
                .to_owned(),
            "28 full 2x128",
        ),
        (
            r#"{"model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 28,
                "kv_channels": 128, "multi_query_attention": false, "multi_query_group_num": 1}"#
                .to_owned(),
            "28 full 32x128",
        ),
        // What a file of several models leaves out of one of them.
        (
            r#"{"model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 4096}}"#
                .to_owned(),
            "32 full 32x128",
        ),
        (
            r#"{"model_type": "idefics2", "text_config": {"model_type": "mistral", "sliding_window": 4096}}"#
                .to_owned(),
            "32 window 4096 8x128",
        ),
        (
            r#"{"model_type": "qwen2_audio", "text_config": {"model_type": "qwen2", "sliding_window": 32768}}"#
                .to_owned(),
            "32 full 32x128",
        ),
    ] {
        let described = read(&text, &WISHES).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(summary(&described), expected, "{text}");
    }
    for (text, expected) in [
        (
            r#"{"model_type": "llama", "max_position_embeddings": 4096}"#,
            "num_hidden_layers is missing",
        ),
        (
            r#"{"model_type": "rwkv6", "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 32}"#,
            "recurrent states",
        ),
        (
            r#"{"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}"#,
            "is an encoder",
        ),
        (
            r#"{"model_type": "unheard_of", "hidden_size": 4096, "num_attention_heads": 32,
                "num_key_value_heads": 8, "num_hidden_layers": 32, "cross_layer_interval": 4}"#,
            "cross_layer_interval is set",
        ),
    ] {
        let error = read(text, &WISHES).unwrap_err();
        assert!(error.0.contains(expected), "{text}: {error}");
    }
}

/// Zamba's heads are of twice the hidden size, and what has groups and widths of heads is Mamba 2.
#[test]
fn zamba_with_few_fields() {
    let zamba = |more: &str| {
        format!(
            r#"{{"model_type": "zamba2", "hidden_size": 3584, "num_hidden_layers": 2, "dtype": "bfloat16",
            "layers_block_type": ["mamba", "hybrid"], "num_attention_heads": 32, "num_key_value_heads": 32,
            "kv_channels": 112, "mamba_headdim": 64, "mamba_ngroups": 2, "mamba_d_state": 64{more}}}"#
        )
    };
    let widths = r#", "mamba_expand": 2, "mamba_d_conv": 4"#;
    let own = format!(r#"{widths}, "n_mamba_heads": 56, "attention_head_dim": 128"#);
    for (more, expected) in [
        (
            widths,
            "2 mamba2 bfloat16[3,7424] bfloat16[112,64,64]; 1 full 32x224",
        ),
        (
            own.as_str(),
            "2 mamba2 bfloat16[3,3840] bfloat16[56,64,64]; 1 full 32x128",
        ),
    ] {
        let described = read(&zamba(more), &WISHES).unwrap();
        assert_eq!(summary(&described), expected);
    }
    let notes = read(&zamba(widths), &WISHES).unwrap().notes.join("\n");
    for part in [
        "attention_head_dim is not given: twice the hidden size 7168 over 32 query heads, 224",
        "mamba_num_heads is not given: the width of a Mamba layer 7168 over its heads' 64, 112",
    ] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    let error = read(&zamba(""), &WISHES).unwrap_err();
    assert!(error.0.contains("mamba_expand is missing"), "{error}");
}

/// A decoder beside an encoder of another kind keeps the encoder's tokens too.
#[test]
fn decoders_beside_an_encoder() {
    let gpt2 =
        r#""model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024"#;
    let beside = |decoder: &str| {
        format!(
            r#"{{"model_type": "vision-encoder-decoder", "is_encoder_decoder": true, "encoder": {{}}, "decoder": {{{decoder}}}}}"#
        )
    };
    let t5gemma = r#""model_type": "t5_gemma_module", "head_dim": 256, "num_attention_heads": 8,
        "num_hidden_layers": 2, "num_key_value_heads": 4, "sliding_window": 4096,
        "layer_types": ["sliding_attention", "full_attention"], "cross_attention_hidden_size": 2304"#;
    let mbart = r#""model_type": "mbart", "d_model": 1024, "decoder_attention_heads": 16, "decoder_layers": 4,
        "num_hidden_layers": 12, "max_position_embeddings": 1536, "add_cross_attention": true"#;
    let moonshine = r#"{"model_type": "moonshine", "is_encoder_decoder": true, "hidden_size": 416,
        "decoder_num_attention_heads": 8, "decoder_num_hidden_layers": 8, "decoder_num_key_value_heads": 4}"#;
    let wishes = Wishes {
        encoder_tokens: Some(197),
        ..WISHES
    };
    for (text, expected) in [
        (beside(gpt2), "12 full 12x64; 12 encoder 12x64"),
        (
            beside(t5gemma),
            "1 window 4096 4x256; 2 encoder 4x256; 1 full 4x256",
        ),
        (beside(mbart), "4 full 16x64; 4 encoder 16x64"),
        (moonshine.to_owned(), "8 full 4x52; 8 encoder 4x52"),
        (format!("{{{gpt2}}}"), "12 full 12x64"),
    ] {
        let described = read(&text, &wishes).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(summary(&described), expected, "{text}");
        if expected.contains("encoder") {
            assert_eq!(described.encoder_tokens, 197);
            let error = read(&text, &WISHES).unwrap_err();
            assert!(error.0.contains("--encoder-tokens"), "{text}: {error}");
        }
    }
    let notes = described("bart", 1).notes;
    assert!(
        notes
            .iter()
            .any(|note| note.contains("as many tokens as the decoder may have, 1024")),
        "{notes:?}"
    );
}

/// What was asked for and changes nothing is said.
#[test]
fn wishes_without_effect_are_noted() {
    let tokens = Wishes {
        encoder_tokens: Some(100),
        ..WISHES
    };
    let dtype = Wishes {
        state_dtype: Some(Dtype::F32),
        ..WISHES
    };
    for (name, wishes, expected) in [
        ("llama", &tokens, Some("--encoder-tokens has no effect")),
        ("whisper", &tokens, None),
        ("llama", &dtype, Some("--state-dtype has no effect")),
        ("lfm2", &dtype, Some("--state-dtype has no effect")),
        ("jamba", &dtype, None),
        ("kimi_linear", &dtype, None),
    ] {
        let notes = read(&fixture(name), wishes).unwrap().notes.join("\n");
        match expected {
            Some(part) => assert!(notes.contains(part), "{name}: {notes}"),
            None => assert!(!notes.contains("no effect"), "{name}: {notes}"),
        }
    }
}

#[test]
fn query_heads_that_ranks_do_not_divide_are_noted() {
    let notes_on = |ranks| {
        let wishes = Wishes {
            tensor_parallel: ranks,
            ..WISHES
        };
        let text = r#"{"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28,
            "num_hidden_layers": 28, "num_key_value_heads": 4}"#;
        read(text, &wishes).unwrap().notes.join("\n")
    };
    assert!(notes_on(8).contains("28 query heads cannot be divided over --tp 8"));
    assert!(!notes_on(4).contains("cannot be divided"));
}

/// Neither are key-value heads that query heads are no multiple of, nor groups of Mamba 2.
#[test]
fn numbers_that_engines_may_refuse_are_noted() {
    for (heads, is_noted) in [(5, true), (64, true), (32, false), (1, false)] {
        let text = changed("llama", "num_key_value_heads", Some(heads.into()));
        let notes = read(&text, &WISHES).unwrap().notes.join("\n");
        let part = format!("{heads} key-value heads do not divide 32 query heads");
        assert_eq!(notes.contains(&part), is_noted, "{notes}");
    }
    for (name, ranks, is_noted) in [
        ("nemotron3", 16, true),
        ("nemotron3", 8, false),
        ("bamba", 8, false),
    ] {
        let notes = described(name, ranks).notes.join("\n");
        let part = format!("groups of Mamba 2 cannot be divided over --tp {ranks} ranks");
        assert_eq!(notes.contains(&part), is_noted, "{name}: {notes}");
    }
}

#[test]
fn texts_that_are_no_config() {
    for text in [
        "",
        "  ",
        "[]",
        "{",
        "nonsense",
        "{\"model_type\": 7}",
        "{}",
        "null",
        "\u{feff}{}",
    ] {
        assert!(read(text, &WISHES).is_err(), "{text}");
    }
    // What Python's json writes.
    let text = changed("llama", "x", Some(Value::from("NaN \" Infinity")));
    let text = text.replacen('{', "{\"limit\": [0.0, Infinity, -Infinity, NaN],", 1);
    assert_eq!(summary(&read(&text, &WISHES).unwrap()), "32 full 8x128");
}

#[test]
fn lists_may_go_on_with_the_draft() {
    let mut kinds = vec!["full_attention"; 45];
    kinds.extend(["sliding_attention"; 3]);
    let text = changed("step3p7", "layer_types", Some(kinds.into()));
    assert_eq!(summary(&read(&text, &WISHES).unwrap()), "45 full 8x128");
    let draft = Wishes {
        draft: true,
        ..WISHES
    };
    let described = read(&text, &draft).unwrap();
    assert_eq!(summary(&described), "45 full 8x128; 3 window 512 8x128");
}

/// What a layer of the recorded models stores, as [`store_text`] has it, the rest left out.
fn recorded_text(spec: &Value) -> String {
    let number = |name: &str| spec[name].as_u64();
    let width = number("head_size").unwrap_or(0);
    let heads = number("num_kv_heads").unwrap_or(0);
    let reach = match spec["type"].as_str().unwrap() {
        "full_attention" => "full".to_owned(),
        "sliding_window" => format!("window {}", number("sliding_window").unwrap()),
        "chunked_local" => format!("chunk {}", number("attention_chunk_size").unwrap()),
        "cross_attention" => "encoder".to_owned(),
        "mamba" => return recorded_state(spec),
        "mla_attention" if width == 132 => return "indexer 132".to_owned(),
        "mla_attention" => return format!("latent {width}"),
        other => panic!("{other}"),
    };
    match number("head_size_v") {
        Some(value) if value != width => format!("{reach} {heads}x{width}+{value}"),
        _ => format!("{reach} {heads}x{width}"),
    }
}

fn state_text(states: &[(String, Vec<u64>)]) -> String {
    let of = |dtype: &str| if dtype == "float32" { 4 } else { 2 };
    let bytes: u64 = states
        .iter()
        .map(|(dtype, dims)| of(dtype) * dims.iter().product::<u64>())
        .sum();
    format!("state of {bytes}, last {:?}", states.last().unwrap())
}

fn recorded_state(spec: &Value) -> String {
    let dtypes = spec["dtypes"].as_array().unwrap();
    let shapes = spec["shapes"].as_array().unwrap();
    let states: Vec<(String, Vec<u64>)> = dtypes
        .iter()
        .zip(shapes)
        .map(|(dtype, dims)| {
            let dims = dims
                .as_array()
                .unwrap()
                .iter()
                .map(|size| size.as_u64().unwrap());
            (dtype.as_str().unwrap().to_owned(), dims.collect())
        })
        .collect();
    state_text(&states)
}

fn own_text(store: &Store) -> String {
    match store {
        Store::State { states, .. } => {
            let states: Vec<_> = states
                .iter()
                .map(|(dtype, dims)| (dtype.name().to_owned(), dims.clone()))
                .collect();
            state_text(&states)
        }
        Store::Latent { width, .. } => format!("latent {width}"),
        other => store_text(other),
    }
}

/// Layers as the reference planner has them: heads of a rank, widths, windows, states.
#[test]
fn layers_are_those_of_recorded_models() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/plans/models.json");
    let models: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for (recorded, name, ranks, state) in [
        ("llama31_8b_tp1", "llama", 1, None),
        ("qwen3_32b_tp2", "qwen3", 2, None),
        ("qwen3_next_80b_none", "qwen3_next", 4, None),
        ("gemma3_27b_tp2", "gemma3", 2, None),
        ("gemma3n_e4b_tp1", "gemma3n", 1, None),
        ("gpt_oss_20b_tp1", "gpt_oss", 1, None),
        ("mistral_7b_tp1", "mistral", 1, None),
        ("llama4_scout_tp8", "llama4", 8, None),
        ("deepseek_v3_bf16", "deepseek_v3", 1, None),
        ("deepseek_v32_fp8", "deepseek_v32", 1, None),
        ("jamba_tp1", "jamba", 1, None),
        ("bamba_9b_tp1", "bamba", 1, None),
        ("falcon_h1_tp1", "falcon_h1", 1, Some(Dtype::F32)),
        ("minimax_text_01_tp8", "minimax_text_01", 8, None),
        ("kimi_linear_48b_tp4", "kimi_linear", 4, None),
        ("lfm2_1_2b_tp1", "lfm2", 1, None),
        ("granite4_h_small_tp1", "granitemoehybrid", 1, None),
        ("whisper_large_v3_tp1", "whisper", 1, None),
        ("bart_large_tp1", "bart", 1, None),
        ("longcat_flash_tp8", "longcat_flash", 8, None),
        ("phi4_mini_tp1", "phi4_mini", 1, None),
        ("command_a_tp4", "cohere2", 4, None),
        ("minimax_m2.5_tp4", "minimax_m2", 4, None),
        ("qwen3_235b_fp8_tp4", "qwen3_moe", 4, None),
        ("qwen3_vl_8b", "qwen3_vl", 1, None),
        ("qwen3.5_35b_tp1", "qwen3_5_moe", 1, None),
        ("qwen3.5_35b_tp2", "qwen3_5_moe", 2, None),
        ("mimo_v2_flash_tp1", "mimo_v2_flash", 1, None),
        ("mimo_v2_flash_tp4", "mimo_v2_flash", 4, None),
        ("glm_5.1_bf16", "glm_moe_dsa", 1, None),
        ("kimi_k2", "kimi_k2", 1, None),
        ("gemma4_26b", "gemma4", 1, None),
        ("gemma4_26b_fp8_token_tp2", "gemma4", 2, None),
        ("mixtral_8x7b_tp2", "mixtral", 2, None),
        ("kimi_k3_tp8", "kimi_k3", 8, None),
        ("nemotron_super_49b_tp2", "nemotron_nas", 2, None),
        ("nemotron3_nano_30b", "nemotron3", 1, None),
        ("nemotron_h_56b_tp4", "nemotron_h", 4, None),
        ("step_3.7_flash_tp2", "step3p7", 2, None),
        ("olmo3_32b_tp2", "olmo3", 2, None),
    ] {
        let model = models
            .as_array()
            .unwrap()
            .iter()
            .find(|model| model["name"] == recorded);
        let model = model.unwrap_or_else(|| panic!("{recorded} is not recorded"));
        let specs: Vec<String> = model["specs"]
            .as_array()
            .unwrap()
            .iter()
            .map(recorded_text)
            .collect();
        let layers = model["layers"].as_array().unwrap();
        let mut expected: Vec<&str> = layers
            .iter()
            .map(|layer| &*specs[layer.as_u64().unwrap() as usize])
            .collect();
        let wishes = Wishes {
            tensor_parallel: ranks,
            state_dtype: state,
            ..WISHES
        };
        let described = read(&fixture(name), &wishes).unwrap();
        let owning = described
            .layers
            .iter()
            .filter(|layer| layer.shares_with.is_none());
        let mut own: Vec<String> = owning.map(|layer| own_text(&layer.store)).collect();
        expected.sort_unstable();
        own.sort_unstable();
        assert_eq!(own, expected, "{recorded}");
        assert_eq!(
            model["encoder_tokens"].as_u64().unwrap(),
            described.encoder_tokens,
            "{recorded}"
        );
    }
}

/// DeepSeek V4's parts are the recorded ones, whatever the number of layers.
#[test]
fn parts_of_deepseek_v4_are_those_recorded() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/plans/models.json");
    let models: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let model = models
        .as_array()
        .unwrap()
        .iter()
        .find(|model| model["name"] == "deepseek_v4_fp8");
    let recorded: BTreeSet<(u64, u64, bool)> = model.unwrap()["specs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|spec| {
            let windowed = spec["type"] == "sliding_window_mla";
            let tokens = if windowed {
                "sliding_window"
            } else {
                "compress_ratio"
            };
            (
                spec["head_size"].as_u64().unwrap(),
                spec[tokens].as_u64().unwrap(),
                windowed,
            )
        })
        .collect();
    let own: BTreeSet<(u64, u64, bool)> = described("deepseek_v4", 1)
        .layers
        .iter()
        .map(|layer| match layer.store {
            Store::Compressed {
                part,
                width,
                tokens,
            } => (width, tokens, !matches!(part, Part::Main | Part::Indexer)),
            ref other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(own, recorded);
}

/// Whatever a file says, there is a plan to make or a refusal, never a panic.
#[test]
fn hostile_values_are_read_or_refused() {
    let odd = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    let values = [
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "0.5",
        "7",
        "1e300",
        "9223372036854775807",
        "18446744073709551615",
        "\"\"",
        "\"x\"",
        "[]",
        "[0]",
        "[-1, 1e30]",
        "[null]",
        "[[]]",
        "{}",
        "{\"a\": 1}",
        "[\"attention\"]",
    ]
    .map(odd);
    let folder = format!("{}/tests/cli/configs", env!("CARGO_MANIFEST_DIR"));
    let (mut planned, mut refused) = (0, 0);
    for entry in std::fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let name = name.strip_suffix(".json").unwrap();
        let config: Value = serde_json::from_str(&fixture(name)).unwrap();
        for field in field_paths(&config, "") {
            for value in &values {
                let mut config = config.clone();
                set(&mut config, &field, Some(value.clone()));
                let text = config.to_string();
                for (tensor_parallel, draft) in [(1, false), (1, true), (u64::MAX, false)] {
                    let wishes = Wishes {
                        tensor_parallel,
                        draft,
                        ..WISHES
                    };
                    let Ok(described) = read(&text, &wishes) else {
                        refused += 1;
                        continue;
                    };
                    let choices = Choices {
                        kv: KvType::Auto,
                        block_size: None,
                        backends: Backends::Auto,
                        max_len: described.max_len.unwrap_or(4096),
                        stages: 1,
                    };
                    // Thousands of layers are one more number; a few say as much.
                    if described.layers.len() < 1000 {
                        let _ = build::stages(&described, &choices);
                    }
                    planned += 1;
                }
            }
        }
    }
    assert!(planned > 1000 && refused > 1000, "{planned} {refused}");
}

fn field_paths(value: &Value, before: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for (name, inner) in value.as_object().into_iter().flatten() {
        paths.push(format!("{before}{name}"));
        paths.extend(field_paths(inner, &format!("{before}{name}.")));
    }
    paths
}
