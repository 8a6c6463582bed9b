//! The examples of the help, one text per command. A test parses each line.

use clap::{Command, Parser};

pub const DEVICES: &str = "\
Examples:
  leasehold devices           a page for a person
  leasehold devices --json    the same for a program";

pub const RUN: &str = "\
Examples:
  leasehold run                                       the bundled model, on the CPU
  leasehold run --device cuda:0 --prompt 'import os'  on a GPU
  leasehold run --model DIR --dtype bf16 --json       a Hugging Face directory, for a program
  leasehold run --report memory.html                  a page about the memory
  leasehold run --device cuda:0 --check               ends at logits that are NaN or infinite
  leasehold run --device cuda --ranks 2               a model over two GPUs
  leasehold run --ranks 2                             the same with two threads on the CPU";

pub const BENCH: &str = "\
Examples:
  leasehold bench decode --model DIR --json      tokens per second of a model
  leasehold bench suspend --rounds 10            how long its weights take to leave and come back";

pub const BENCH_DECODE: &str = "\
Examples:
  leasehold bench decode
  leasehold bench decode --model DIR --device cuda:0 --dtype bf16 --prompt 1000
  leasehold bench decode --config config.json --random-weights  a shape without weights
  leasehold bench decode --batch 8                               eight sequences together
  leasehold bench decode --batch 1,8,32                          each of them, a line for each
  leasehold bench decode --batch 8 --join 1000                   how long they wait for a prompt
  leasehold bench decode --device cuda --ranks 2 --dtype bf16    two ranks beside one";

pub const BENCH_SUSPEND: &str = "\
Examples:
  leasehold bench suspend --rounds 10
  leasehold bench suspend --device cuda:0 --model DIR --json";

pub const COMPLETIONS: &str = "\
Examples:
  leasehold completions bash  written into a file that bash-completion reads
  leasehold completions zsh   written into a file _leasehold of $fpath
  leasehold completions fish";

pub const MAN: &str = "\
Examples:
  leasehold man           the page of the command, for `man -l -`
  leasehold man man/man1  a page of each command into a folder";

/// Parses each example of a program's help. Returns how many there are.
///
/// # Panics
/// A command without an example; an example that is refused.
pub fn check<A: Parser>() -> usize {
    let command = A::command();
    let name = command.get_name().to_owned();
    visit::<A>(&command, &name, &name)
}

/// The words of an example: up to two spaces, after which the explanation begins.
fn words(line: &str) -> Vec<String> {
    let call = line.trim().split("  ").next().unwrap_or_default();
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in call.chars() {
        match c {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            c => words.last_mut().expect("one word at least").push(c),
        }
    }
    words
}

fn visit<A: Parser>(command: &Command, program: &str, path: &str) -> usize {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let begin = format!("  {program} ");
    let examples: Vec<_> = help.lines().filter(|l| l.starts_with(&begin)).collect();
    assert!(!examples.is_empty() || path == program, "{path}: no example in its help");
    for line in &examples {
        let call = words(line);
        assert!(line.trim().starts_with(path), "{path}: {line}");
        if let Err(e) = A::try_parse_from(&call) {
            panic!("{path}: the example {call:?} is refused: {e}");
        }
    }
    let below = command.get_subcommands().filter(|c| c.get_name() != "help");
    let below = below.map(|c| visit::<A>(c, program, &format!("{path} {}", c.get_name())));
    examples.len() + below.sum::<usize>()
}
