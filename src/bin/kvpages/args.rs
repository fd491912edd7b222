//! The arguments, which are also `--help` and the completions of shells.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use kvpages::dtype::Dtype;
use kvpages::plan::Policy;

use crate::build::{Backends, KvType};
use crate::units;

/// Plans the paged KV cache of a model from its config.json.
#[derive(Debug, Parser)]
#[command(name = "kvpages", version, about, propagate_version = true, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say how many tokens and requests fit in a memory, what a token costs, and what is wasted
    #[command(after_help = EXAMPLES)]
    Plan(Box<PlanArgs>),
    /// Print completions for a shell
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

const EXIT_CODES: &str = "\
Exit codes:
  0  the plan was made
  1  the model does not fit, or its config or plan is refused; stderr says why
  2  the arguments are wrong, or the config cannot be read";

const EXAMPLES: &str = "\
Memory is what is left for the cache on ONE rank: take weights, activations and
what the engine keeps free off the device's memory first. There is no
--gpu-memory-utilization for that reason. Sizes are bytes or have a unit:
80GiB, 80GB, 8_000_000_000.

Examples:
  kvpages plan config.json --memory 40GiB
  kvpages plan config.json --memory 80GiB --tp 8 --max-model-len 131072 --kv-dtype fp8
  kvpages plan config.json --memory 10GiB --max-model-len auto
  kvpages plan config.json --compare 24GiB,48GiB,80GiB
  kvpages plan config.json --memory 40GiB --compare bf16,fp8,tp=1,tp=2
  kvpages plan config.json --memory 40GiB --map memory.svg
  curl -s https://host/config.json | kvpages plan - --memory 40GiB --json

Exit codes:
  0  the plan was made
  1  the model does not fit, or its config or plan is refused; stderr says why
  2  the arguments are wrong, or the config cannot be read";

/// Arguments of `kvpages plan`.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// The model's config.json as Hugging Face publishes it; - for standard input
    #[arg(value_name = "CONFIG", value_hint = clap::ValueHint::FilePath)]
    pub config: PathBuf,

    /// Memory for the cache on each rank, such as 80GiB
    #[arg(short, long, value_name = "SIZE", value_parser = units::bytes, allow_hyphen_values = true)]
    pub memory: Option<u64>,

    /// Ranks of tensor parallelism: key-value heads and states are divided over them
    #[arg(long, visible_alias = "tensor-parallel-size", value_name = "RANKS", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    pub tp: u64,

    /// Ranks of pipeline parallelism: layers are divided over them
    #[arg(long, visible_alias = "pipeline-parallel-size", value_name = "RANKS", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    pub pp: u64,

    /// Tokens of the longest request; auto for the most that fit, up to the config's. The config's own if not given
    #[arg(short = 'l', long, value_name = "TOKENS|auto", value_parser = max_len, allow_hyphen_values = true)]
    pub max_model_len: Option<MaxLen>,

    /// Tokens of a usual request, which memory is saved for besides the longest: at most those of the longest. 8192 if not given
    #[arg(long, value_name = "TOKENS", value_parser = units::count, allow_hyphen_values = true)]
    pub typical_len: Option<u64>,

    /// Tokens scheduled and not yet settled, over all concurrent batches; windows hold them too
    #[arg(long, visible_alias = "max-num-batched-tokens", value_name = "TOKENS", default_value = "8192", value_parser = units::count, allow_hyphen_values = true)]
    pub max_batched_tokens: u64,

    /// Type of keys and values: auto (the model's), bf16, f16, f32, fp8, fp8_e5m2, or with scales in the page
    /// fp8_per_token_head, int8_per_token_head, int4_per_token_head, nvfp4
    #[arg(short, long, visible_alias = "kv-cache-dtype", value_name = "TYPE", default_value = "auto", value_parser = kv_type)]
    pub kv_dtype: KvType,

    /// Type of recurrent states: f32, bf16 or f16. The config's if not given
    #[arg(long, visible_alias = "mamba-ssm-cache-dtype", value_name = "TYPE", value_parser = state_type)]
    pub state_dtype: Option<Dtype>,

    /// Tokens of a block. Chosen if not given
    #[arg(short, long, value_name = "TOKENS", value_parser = units::count, allow_hyphen_values = true)]
    pub block_size: Option<u64>,

    /// Rules that group layers and size pages
    #[arg(long, value_enum, default_value = "compact")]
    pub policy: PolicyName,

    /// Attention backend whose kernels read the pages: auto (FlashAttention, FlashMLA or what the layers need),
    /// none, or a preset of docs/backends.md, such as flash-infer-nhd or triton-mla. Those for latents go to latents, the others to keys and values
    #[arg(long, value_name = "PRESET", default_value = "auto", hide_possible_values = true, value_parser = backend_names())]
    pub backend: String,

    /// Plan the draft layers (MTP) that the config describes too
    #[arg(long)]
    pub draft: bool,

    /// Tokens of an encoder's output that cross attention keeps. The config's if not given
    #[arg(long, value_name = "TOKENS", value_parser = units::count, allow_hyphen_values = true)]
    pub encoder_tokens: Option<u64>,

    /// One line for each memory size (24GiB,48GiB), type (bf16,fp8) or number of ranks (tp=2,tp=4) of the
    /// list; where there are several sorts, one for each combination
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', conflicts_with_all = ["map", "explain"])]
    pub compare: Vec<String>,

    /// Print JSON; docs/cli.md has its fields
    #[arg(long, conflicts_with = "explain")]
    pub json: bool,

    /// Print the library's own explanation of the plan too
    #[arg(long)]
    pub explain: bool,

    /// Draw the memory as an SVG picture; - for standard output
    #[arg(long, value_name = "FILE.svg", value_hint = clap::ValueHint::FilePath)]
    pub map: Option<PathBuf>,
}

/// The longest request as it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxLen {
    /// The most that fit.
    Auto,
    /// So many tokens.
    Tokens(u64),
}

/// A policy's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    /// The rules of vLLM 0.26
    Reference,
    /// The most tokens in the same memory, and never fewer than reference
    Compact,
}

impl PolicyName {
    /// The library's policy.
    pub fn policy(self) -> Policy {
        match self {
            PolicyName::Reference => Policy::Reference,
            PolicyName::Compact => Policy::Compact,
        }
    }

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            PolicyName::Reference => "reference",
            PolicyName::Compact => "compact",
        }
    }
}

fn max_len(text: &str) -> Result<MaxLen, String> {
    match text {
        "auto" => Ok(MaxLen::Auto),
        other => units::count(other).map(MaxLen::Tokens),
    }
}

/// A type of keys and values by its name.
pub fn kv_type(text: &str) -> Result<KvType, String> {
    KvType::parse(text).ok_or_else(|| {
        format!(
            "it is no type of a cache; known are {}",
            KvType::NAMES.join(", ")
        )
    })
}

fn state_type(text: &str) -> Result<Dtype, String> {
    match units::dtype(text) {
        Some(dtype) if dtype != Dtype::F64 => Ok(dtype),
        _ => Err("it is no type of a state; known are f32, bf16, f16".to_owned()),
    }
}

fn backend_names() -> PossibleValuesParser {
    let names = ["auto".to_owned(), "none".to_owned()];
    PossibleValuesParser::new(names.into_iter().chain(Backends::preset_names()))
}
