//! What the makers' configuration classes say where a published file leaves a field out.
//!
//! Each is the default of the class of that `model_type` in Hugging Face transformers. Only fields
//! that published files of the family do leave out are listed; elsewhere a missing field is refused.

/// A field's name and its default.
type Field = (&'static str, u64);

/// Fields of families that agree on them.
const OF_FAMILIES: &[(&[&str], &[Field])] = &[
    (
        &["gemma"],
        &[
            ("num_key_value_heads", 16),
            ("head_dim", 256),
            ("max_position_embeddings", 8192),
        ],
    ),
    (
        &["gemma2"],
        &[
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("sliding_window", 4096),
            ("sliding_window_pattern", 2),
            ("max_position_embeddings", 8192),
        ],
    ),
    (
        &["gemma3", "gemma3_text"],
        &[
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("sliding_window", 4096),
            ("sliding_window_pattern", 6),
            ("max_position_embeddings", 131_072),
        ],
    ),
    (
        &["gemma4", "gemma4_text"],
        &[
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("global_head_dim", 512),
            ("sliding_window", 512),
            ("sliding_window_pattern", 6),
            ("max_position_embeddings", 131_072),
        ],
    ),
    (
        &["mistral"],
        &[
            ("num_key_value_heads", 8),
            ("sliding_window", 4096),
            ("max_position_embeddings", 131_072),
        ],
    ),
    (
        &["mixtral"],
        &[
            ("num_key_value_heads", 8),
            ("max_position_embeddings", 131_072),
        ],
    ),
    (&["phi3"], &[("max_position_embeddings", 4096)]),
    (&["falcon"], &[("max_position_embeddings", 2048)]),
    (
        &["jamba"],
        &[
            ("num_key_value_heads", 8),
            ("attn_layer_period", 8),
            ("attn_layer_offset", 4),
            ("mamba_d_state", 16),
            ("mamba_d_conv", 4),
            ("mamba_expand", 2),
            ("max_position_embeddings", 262_144),
        ],
    ),
    (
        &["bamba"],
        &[
            ("num_key_value_heads", 8),
            ("mamba_n_heads", 128),
            ("mamba_n_groups", 1),
            ("mamba_d_state", 256),
            ("mamba_d_conv", 4),
            ("mamba_expand", 2),
            ("max_position_embeddings", 262_144),
        ],
    ),
    (
        &["falcon_h1"],
        &[
            ("num_key_value_heads", 8),
            ("mamba_d_ssm", 1024),
            ("mamba_n_heads", 128),
            ("mamba_n_groups", 1),
            ("mamba_d_state", 256),
            ("mamba_d_conv", 4),
            ("mamba_expand", 2),
            ("max_position_embeddings", 8192),
        ],
    ),
    (
        &["granitemoehybrid"],
        &[
            ("mamba_n_heads", 128),
            ("mamba_n_groups", 1),
            ("mamba_d_state", 256),
            ("mamba_d_conv", 4),
            ("mamba_expand", 2),
            ("max_position_embeddings", 2048),
        ],
    ),
    (
        &["whisper"],
        &[
            ("max_source_positions", 1500),
            ("max_target_positions", 448),
        ],
    ),
    (
        &["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"],
        &[
            ("num_key_value_heads", 2),
            ("head_dim", 256),
            ("full_attention_interval", 4),
            ("linear_conv_kernel_dim", 4),
            ("linear_key_head_dim", 128),
            ("linear_value_head_dim", 128),
            ("linear_num_key_heads", 16),
            ("linear_num_value_heads", 32),
            ("max_position_embeddings", 32_768),
        ],
    ),
    (
        &["llama4", "llama4_text"],
        &[
            ("num_attention_heads", 40),
            ("num_key_value_heads", 8),
            ("head_dim", 128),
            ("attention_chunk_size", 8192),
            ("no_rope_layer_interval", 4),
            ("max_position_embeddings", 131_072),
        ],
    ),
    (
        &["cohere2"],
        &[
            ("sliding_window", 4096),
            ("sliding_window_pattern", 4),
            ("max_position_embeddings", 8192),
        ],
    ),
    (
        &["lfm2", "lfm2_moe"],
        &[
            ("num_key_value_heads", 8),
            ("conv_L_cache", 3),
            ("max_position_embeddings", 128_000),
        ],
    ),
];

/// Sizes that a file of several models leaves out of the model in it where they are the class's own.
/// A file of one model has them.
const OF_NESTED: &[(&[&str], &[Field])] = &[
    (
        &["llama"],
        &[
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("hidden_size", 4096),
            ("max_position_embeddings", 2048),
        ],
    ),
    (
        &["mistral", "mixtral"],
        &[
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("hidden_size", 4096),
        ],
    ),
    (
        &["qwen2"],
        &[
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 32),
            ("hidden_size", 4096),
            ("max_position_embeddings", 32_768),
        ],
    ),
    (
        &["qwen3"],
        &[
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 32),
            ("head_dim", 128),
            ("hidden_size", 4096),
            ("max_position_embeddings", 32_768),
        ],
    ),
    (
        &["phi3"],
        &[
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("hidden_size", 3072),
        ],
    ),
    (
        &["gemma"],
        &[("num_hidden_layers", 28), ("num_attention_heads", 16)],
    ),
    (
        &["gemma2", "gemma3_text"],
        &[("num_hidden_layers", 26), ("hidden_size", 2304)],
    ),
];

fn find(table: &[(&[&'static str], &[Field])], family: &str, field: &str) -> Option<u64> {
    let (_, fields) = table
        .iter()
        .find(|(families, _)| families.contains(&family))?;
    let (_, number) = fields.iter().find(|(name, _)| *name == field)?;
    Some(*number)
}

/// The default of a family's field.
pub fn of(family: &str, field: &str) -> Option<u64> {
    find(OF_FAMILIES, family, field)
}

/// The same of a model within a file of several.
pub fn of_nested(family: &str, field: &str) -> Option<u64> {
    find(OF_NESTED, family, field)
}

/// Families that cannot be planned whatever their fields say, and why.
pub fn why_not(family: &str) -> Option<&'static str> {
    const STATES: &[&str] = &["recurrent_gemma", "retnet", "xlstm"];
    const ENCODERS: &[&str] = &[
        "albert",
        "bert",
        "camembert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "xlm-roberta",
    ];
    if STATES.contains(&family) || family.starts_with("rwkv") {
        Some("its layers keep recurrent states of a form that is not known here")
    } else if ENCODERS.contains(&family) {
        Some("it is an encoder, which reads a text at once and keeps no cache")
    } else {
        None
    }
}

/// Families whose layers are decided by plain fields, seen to be so.
const PLAIN: &[&str] = &[
    "arcee",
    "apertus",
    "baichuan",
    "bloom",
    "chatglm",
    "codegen",
    "cohere",
    "dbrx",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "falcon",
    "gemma",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "granite",
    "granitemoe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "internlm",
    "internlm2",
    "internlm3",
    "jais",
    "llama",
    "minimax_m2",
    "ministral3",
    "mistral",
    "mixtral",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phi3_v",
    "phimoe",
    "phi4mm",
    "phi4_multimodal",
    "qwen",
    "qwen2",
    "qwen2_moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3",
    "qwen3_moe",
    "qwen3_omni_moe_text",
    "qwen3_vl",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_vl_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
];

/// Whether plain fields are known to decide a family's layers.
pub fn is_plain(family: &str) -> bool {
    PLAIN.contains(&family)
}

/// Families that rules of their own decide.
const BY_RULES: &[&str] = &[
    "bart",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "exaone4",
    "gemma3n",
    "gemma3n_text",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "kimi_k2",
    "kimi_linear",
    "longcat_flash",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "mimo_v2_flash",
    "minimax",
    "minimax_m1",
    "minimax_text_01",
    "mllama_text_model",
    "nemotron-nas",
    "nemotron_h",
    "olmo3",
    "step3p5",
    "step3p7",
    "t5_gemma_module",
    "zamba",
    "zamba2",
];

/// Whether a family was looked at, so that what its files leave out is what its class says.
pub fn is_known(family: &str) -> bool {
    is_plain(family)
        || BY_RULES.contains(&family)
        || OF_FAMILIES
            .iter()
            .any(|(families, _)| families.contains(&family))
}

/// Families whose classes have one key-value head unless `multi_query` says otherwise.
pub fn is_multi_query(family: &str) -> bool {
    ["falcon", "gpt_bigcode"].contains(&family)
}

/// Families where `model_max_length` is how long sequences may be, whatever other fields say.
pub fn has_own_max_len(family: &str) -> bool {
    ["cohere", "cohere2"].contains(&family)
}

/// Families where `sliding_window` holds for all layers when nothing says which have it.
pub fn windows_all(family: &str) -> bool {
    [
        "mistral",
        "mixtral",
        "phi3",
        "phi3_v",
        "phimoe",
        "starcoder2",
        "phi4mm",
        "phi4_multimodal",
    ]
    .contains(&family)
}
