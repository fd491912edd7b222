//! The command-line tool: plans the paged KV cache of a model from its `config.json`.
//!
//! ```text
//! config.json -- config --> layers -- build --> models -- planning --> plan --> report, json, compare, map
//! ```

mod args;
mod build;
mod compare;
mod config;
mod json;
mod map;
mod planning;
mod report;
mod units;

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Cli, Command, PlanArgs};
use planning::{Answer, Question};

/// More than any config has. What is read may be a stream without an end.
const MOST_BYTES: u64 = 64 << 20;

/// Why the tool ends without having done what it was asked.
enum Failure {
    /// The arguments are wrong, or a file cannot be read or written.
    Usage(String),
    /// The model does not fit, or is refused.
    Refused(String),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Plan(args) => run_plan(&args),
        Command::Completions { shell } => completions(shell),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Refused(text)) => fail(&text, 1),
        Err(Failure::Usage(text)) => fail(&text, 2),
    }
}

fn fail(text: &str, code: u8) -> ExitCode {
    // Nobody is left to tell when this cannot be written.
    let _ = writeln!(std::io::stderr(), "error: {}", units::printable(text));
    ExitCode::from(code)
}

fn completions(shell: clap_complete::Shell) -> Result<(), Failure> {
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "kvpages", &mut out);
    print(&String::from_utf8_lossy(&out))
}

/// Writes to standard output. A reader that has seen enough, such as `head`, is no failure.
fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().write_all(units::printable(text).as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::Usage(format!("standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn run_plan(args: &PlanArgs) -> Result<(), Failure> {
    if !args.compare.is_empty() {
        let comparison = compare::questions(args).map_err(Failure::Usage)?;
        let text = read(&args.config)?;
        return compare_all(&text, args, &comparison);
    }
    if args.json && args.map.as_deref() == Some(Path::new("-")) {
        return Err(Failure::Usage(
            "--map - and --json both write to standard output: give --map the name of a file"
                .to_owned(),
        ));
    }
    let Some(memory) = args.memory else {
        return Err(Failure::Usage(
            "--memory is missing: the bytes that each rank has left for the cache, such as --memory 40GiB; \
             or --compare with several sizes"
                .to_owned(),
        ));
    };
    let text = read(&args.config)?;
    let question = Question::of(args, memory);
    let answer = planning::answer(&text, args, &question)
        .map_err(|refusal| Failure::Refused(refusal.to_string()))?;
    if let Some(path) = &args.map {
        draw(path, &answer)?;
        if path.as_os_str() == "-" {
            return Ok(());
        }
    }
    match args.json {
        true => print(&format!("{}\n", json::plan(&answer))),
        false => print(&report::text(&answer, args.explain)),
    }
}

fn compare_all(text: &str, args: &PlanArgs, questions: &[Question]) -> Result<(), Failure> {
    let answers = questions
        .iter()
        .map(|question| planning::answer(text, args, question));
    let rows = compare::distinct(questions.iter().zip(answers).collect());
    if rows.iter().all(|(_, answer)| answer.is_err()) {
        return Err(Failure::Refused(compare::refusals(&rows)));
    }
    match args.json {
        true => print(&format!("{}\n", json::comparison(&rows))),
        false => print(&compare::table(&rows)),
    }
}

fn draw(path: &Path, answer: &Answer) -> Result<(), Failure> {
    let picture = map::svg(answer);
    if path.as_os_str() == "-" {
        return print(&picture);
    }
    std::fs::write(path, picture)
        .map_err(|error| Failure::Usage(format!("--map {}: {error}", path.display())))
}

fn read_text(from: impl Read) -> std::io::Result<String> {
    use std::io::{Error, ErrorKind};
    let mut bytes = Vec::new();
    from.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES {
        let text = "it has more than 64 MiB, which no config.json has";
        return Err(Error::new(ErrorKind::FileTooLarge, text));
    }
    String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::InvalidData, error))
}

fn read(path: &Path) -> Result<String, Failure> {
    let unreadable = |error: std::io::Error| {
        Failure::Usage(match error.kind() {
            std::io::ErrorKind::InvalidData => {
                format!("{}: it is no text in UTF-8", path.display())
            }
            std::io::ErrorKind::NotFound => format!(
                "{}: {error}; give the path of a config.json, of a folder that has one, or - for standard input \
                 (nothing is downloaded)",
                path.display()
            ),
            _ => format!("{}: {error}", path.display()),
        })
    };
    let text = if path.as_os_str() == "-" {
        read_text(std::io::stdin())
    } else if path.is_dir() {
        File::open(path.join("config.json")).and_then(read_text)
    } else {
        File::open(path).and_then(read_text)
    };
    let text = text.map_err(unreadable)?;
    config::check_json(&text)
        .map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))?;
    Ok(text)
}
