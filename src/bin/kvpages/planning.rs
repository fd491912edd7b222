//! One plan, and the numbers that people ask of it.

use kvpages::plan::{Plan, PlanConfig, PlanError, Worker, plan};
use kvpages::spec::{Counting, Limits, Spec, StateCacheMode};
use serde_json::Value;

use crate::args::{MaxLen, PlanArgs, PolicyName};
use crate::build::{self, Backends, Choices, KvType};
use crate::config::{self, Described, Store, Wishes};
use crate::units::size;

/// Tokens of a usual request where nobody said.
const TYPICAL_LEN: u64 = 8192;

/// What is asked of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// Bytes for the cache on each rank.
    pub memory: u64,
    /// Ranks of tensor parallelism.
    pub tp: u64,
    /// Pipeline stages.
    pub pp: u64,
    /// Tokens of the longest request.
    pub max_len: Option<MaxLen>,
    /// Tokens of a usual request, where somebody said.
    pub typical_len: Option<u64>,
    /// Tokens in flight.
    pub in_flight: u64,
    /// How keys and values are stored.
    pub kv: KvType,
    /// Tokens of a block, where somebody said.
    pub block_size: Option<u64>,
    /// Rules.
    pub policy: PolicyName,
    /// Which backends read the pages.
    pub backends: Backends,
}

impl Question {
    /// What the arguments ask.
    pub fn of(args: &PlanArgs, memory: u64) -> Question {
        Question {
            memory,
            tp: args.tp,
            pp: args.pp,
            max_len: args.max_model_len,
            typical_len: args.typical_len,
            in_flight: args.max_batched_tokens,
            kv: args.kv_dtype,
            block_size: args.block_size,
            policy: args.policy,
            backends: Backends::parse(&args.backend),
        }
    }
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal(pub String);

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A plan's error in the words of the arguments.
fn plan_refusal(error: &PlanError, question: &Question) -> Refusal {
    let rank = |worker: usize| match question.pp {
        1 => "a rank".to_owned(),
        _ => format!("a rank of stage {worker}"),
    };
    // A request holds whole blocks.
    let advice = match question.block_size {
        Some(_) => "give more memory, or less of --block-size",
        None => "give more memory",
    };
    Refusal(match *error {
        PlanError::NotEnoughMemory {
            worker,
            needed,
            available,
            max_model_len,
            longest,
        } => format!(
            "one request of {max_model_len} tokens needs {} ({needed} bytes) on {}, which has {} ({available} bytes); {}",
            size(needed),
            rank(worker),
            size(available),
            match longest {
                0 => format!("no length fits: {advice}"),
                longest => format!(
                    "the longest that fits is {longest} tokens: give --max-model-len {longest}, or auto, or more memory"
                ),
            }
        ),
        PlanError::AutoFitImpossible {
            worker,
            needed,
            available,
        } => format!(
            "a request of 1 token needs {} ({needed} bytes) on {}, which has {} ({available} bytes), so no length fits: {advice}",
            size(needed),
            rank(worker),
            size(available),
        ),
        ref other => other.to_string(),
    })
}

/// A plan and what it says.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The question.
    pub question: Question,
    /// The model.
    pub described: Described,
    /// The plan.
    pub plan: Plan,
    /// The library's explanation.
    pub explanation: Value,
    /// What it holds of the longest requests.
    pub longest: Holds,
    /// What it holds of usual requests; the same where they are no shorter.
    pub typical: Holds,
    /// Bytes that one more token of a long request takes on all ranks together.
    pub bytes_per_further_token: f64,
    /// The same on the rank where they are most.
    pub bytes_per_further_token_on_rank: f64,
}

/// What a plan holds of requests of one length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Holds {
    /// Tokens of each request.
    pub len: u64,
    /// Requests at once.
    pub requests: f64,
    /// Tokens in them.
    pub tokens: u64,
    /// Blocks that requests may use.
    pub usable_blocks: u64,
    /// Blocks of one request.
    pub blocks: u64,
    /// Bytes of one request on the rank where they are most.
    pub bytes: u64,
    /// The same for each of its tokens.
    pub bytes_per_token: f64,
}

impl Holds {
    /// Requests at once for people, with two digits: never more than there are.
    pub fn requests_text(&self) -> String {
        let hundredths = 100 * u128::from(self.usable_blocks) / u128::from(self.blocks.max(1));
        format!("{}.{:02}", hundredths / 100, hundredths % 100)
    }
}

/// Plans what is asked.
pub fn answer(text: &str, args: &PlanArgs, question: &Question) -> Result<Answer, Refusal> {
    let wishes = Wishes {
        tensor_parallel: question.tp,
        draft: args.draft,
        state_dtype: args.state_dtype,
        encoder_tokens: args.encoder_tokens,
    };
    let described = config::read(text, &wishes).map_err(|error| Refusal(error.0))?;
    let mut described = described;
    let max_len = longest(&mut described, question)?;
    let typical_len = typical(question, max_len)?;
    let choices = Choices {
        kv: question.kv,
        block_size: question.block_size,
        backends: question.backends,
        max_len,
        stages: question.pp,
    };
    let stages = build::stages(&described, &choices).map_err(Refusal)?;
    note_choices(&mut described, question);
    let memory_bytes = i64::try_from(question.memory).unwrap_or(i64::MAX);
    let workers: Vec<Worker> = stages
        .into_iter()
        .map(|model| Worker {
            model,
            memory_bytes,
        })
        .collect();
    let config = PlanConfig {
        policy: question.policy.policy(),
        limits: Limits {
            max_model_len: max_len,
            context_parallel_size: 1,
            max_tokens_in_flight: question.in_flight,
            max_encoder_tokens: described.encoder_tokens,
            state_cache_mode: StateCacheMode::None,
            counting: Counting::Reference,
        },
        auto_fit_max_model_len: question.max_len == Some(MaxLen::Auto),
        hybrid_manager_off: false,
        cross_layer_blocks: false,
        num_blocks_override: None,
        reserved_blocks: 1,
        has_draft_layers: described.layers.iter().any(|layer| layer.is_draft),
        typical_len,
        choose_block_sizes: question.block_size.is_none() && !build::blocks_are_fixed(&described),
    };
    let plan = plan(&workers, &config).map_err(|error| plan_refusal(&error, question))?;
    let explanation = serde_json::from_str(&plan.explain_json()).unwrap_or_default();
    let fitted = plan.config.limits.max_model_len;
    let further = plan.workers.iter().map(|worker| {
        let owned = worker
            .groups
            .iter()
            .flat_map(|group| group.spec.specs().iter().zip(repeats(group)));
        owned
            .map(|(spec, times)| further_token(spec) * times as f64)
            .sum::<f64>()
    });
    let further: Vec<f64> = further.collect();
    Ok(Answer {
        question: question.clone(),
        longest: holds(&plan, fitted)?,
        typical: holds(&plan, typical_len.min(fitted))?,
        bytes_per_further_token: further.iter().sum::<f64>() * question.tp as f64,
        bytes_per_further_token_on_rank: further.into_iter().fold(0.0, f64::max),
        described,
        plan,
        explanation,
    })
}

/// How many layers each spec of a group stands for.
fn repeats(group: &kvpages::plan::Group) -> Vec<usize> {
    match &group.spec {
        kvpages::plan::GroupSpec::One(_) => vec![group.layers.len()],
        kvpages::plan::GroupSpec::Set(set) => {
            let here = usize::from(!group.layers.is_empty());
            vec![here; set.specs().len()]
        }
    }
}

/// Bytes that a layer keeps of each token of a long request, padding not counted.
fn further_token(spec: &Spec) -> f64 {
    match spec {
        Spec::Attention(attention) if attention.fields().kind.is_full_family() => {
            attention.page().unpadded as f64 / attention.fields().block_size as f64
        }
        _ => 0.0,
    }
}

fn holds(plan: &Plan, len: u64) -> Result<Holds, Refusal> {
    let capacity = plan
        .capacity_of(len)
        .map_err(|error| Refusal(error.to_string()))?;
    let largest = plan
        .workers
        .iter()
        .map(|worker| worker.bytes_per_block)
        .max();
    let bytes = largest
        .unwrap_or(0)
        .saturating_mul(capacity.blocks_per_request);
    // A quotient of two numbers that a float has may fall below the whole number that it is.
    let tokens = u128::from(capacity.usable_blocks) * u128::from(len)
        / u128::from(capacity.blocks_per_request.max(1));
    Ok(Holds {
        len,
        requests: capacity.requests(),
        tokens: u64::try_from(tokens).unwrap_or(u64::MAX),
        usable_blocks: capacity.usable_blocks,
        blocks: capacity.blocks_per_request,
        bytes,
        bytes_per_token: bytes as f64 / len.max(1) as f64,
    })
}

fn longest(described: &mut Described, question: &Question) -> Result<u64, Refusal> {
    match (question.max_len, described.max_len) {
        (Some(MaxLen::Tokens(tokens)), Some(own)) if tokens > own => {
            described.notes.push(format!(
                "--max-model-len {tokens} is more than the {own} tokens that the config says the model is made for"
            ));
            Ok(tokens)
        }
        (Some(MaxLen::Tokens(tokens)), _) => Ok(tokens),
        (_, Some(own)) => Ok(own),
        (_, None) => Err(Refusal(format!(
            "model_type {}: the config does not say how long sequences may be (max_position_embeddings); give --max-model-len{}",
            described.model_type,
            if described
                .layers
                .iter()
                .all(|layer| matches!(layer.store, Store::State { .. }))
            {
                ", such as 8192: its layers keep states, which are as large for any length"
            } else {
                ""
            }
        ))),
    }
}

/// Tokens of a usual request.
fn typical(question: &Question, max_len: u64) -> Result<u64, Refusal> {
    match question.typical_len {
        Some(tokens) if tokens > max_len => Err(Refusal(format!(
            "--typical-len {tokens} is more than the longest request has, {max_len} tokens: give less, or more of --max-model-len"
        ))),
        Some(tokens) => Ok(tokens),
        None => Ok(TYPICAL_LEN.min(max_len)),
    }
}

fn note_choices(described: &mut Described, question: &Question) {
    let states = described
        .layers
        .iter()
        .any(|layer| matches!(layer.store, config::Store::State { .. }));
    if states && !matches!(question.kv, KvType::Auto) {
        let note = "--kv-dtype is for keys and values; states keep their own types (--state-dtype)";
        described.notes.push(note.to_owned());
    }
    let windows = described.layers.iter().any(|layer| {
        matches!(
            layer.store,
            config::Store::KeyValue {
                reach: config::Reach::Window(_) | config::Reach::Chunk(_),
                ..
            } | config::Store::Compressed { .. }
        )
    });
    if windows {
        described.notes.push(format!(
            "windows are counted with {} tokens in flight beside them, which any request may have; --max-batched-tokens changes it",
            question.in_flight
        ));
    }
    let latents = described.layers.iter().any(|layer| {
        matches!(
            layer.store,
            config::Store::Latent { .. }
                | config::Store::Indexer { .. }
                | config::Store::Compressed { .. }
        )
    });
    if latents && question.tp > 1 {
        let note = "latents (MLA) are on every rank: more of --tp does not make them smaller";
        described.notes.push(note.to_owned());
    }
    if build::blocks_are_fixed(described) && question.kv == KvType::Auto {
        let note = "--kv-dtype fp8 is the packed format of 584 bytes that kernels of DeepSeek V4 usually read";
        described.notes.push(note.to_owned());
    }
    if question.pp > 1 {
        described.notes.push(format!(
            "layers are divided over {} stages evenly; those left over go to the stages before the last",
            question.pp
        ));
    }
}
