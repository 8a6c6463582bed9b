//! The examples of the help, one text per command. A test parses each line.

pub(crate) const DEVICES: &str = "\
Examples:
  leasehold devices           a page for a person
  leasehold devices --json    the same for a program";

pub(crate) const RUN: &str = "\
Examples:
  leasehold run                                       the bundled model, on the CPU
  leasehold run --device cuda:0 --prompt 'import os'  on a GPU
  leasehold run --model DIR --dtype bf16 --json       a Hugging Face directory, for a program
  leasehold run --report memory.html                  a page about the memory
  leasehold run --device cuda:0 --sim                 without a GPU
  leasehold run --device cuda:0 --check               ends at logits that are NaN or infinite
  leasehold run --device cuda --ranks 2               a model over two GPUs
  leasehold run --ranks 2                             the same with two threads on the CPU";

pub(crate) const REPLAY: &str = "\
Examples:
  leasehold replay trace.csv.gz                             costs and memory of a trace
  leasehold replay snapshot.pickle --find-min-budget        the least memory for PyTorch's history
  leasehold replay trace.csv.gz --peer system               the same on the process's heap
  leasehold replay trace.csv.gz --report memory.html        a page about the memory";

pub(crate) const BENCH: &str = "\
Examples:
  leasehold bench lease                          handles and leases, with limits
  leasehold bench decode --model DIR --json      tokens per second of a model
  leasehold bench cuda --samples 101             overhead over the driver's own calls";

pub(crate) const BENCH_ALLOC: &str = "\
Examples:
  leasehold bench alloc --workload mixed --threads 1,8
  leasehold bench alloc --trace trace.csv.gz --rounds 3";

pub(crate) const BENCH_COPY: &str = "\
Examples:
  leasehold bench copy
  leasehold bench copy --device cuda:0 --kib 64,65536";

pub(crate) const BENCH_LEASE: &str = "\
Examples:
  leasehold bench lease
  leasehold bench lease --json";

pub(crate) const BENCH_STREAM: &str = "\
Examples:
  leasehold bench stream
  leasehold bench stream --threads 2 --json";

pub(crate) const BENCH_GRAPH: &str = "\
Examples:
  leasehold bench graph
  leasehold bench graph --nodes 10000 --threads 2";

#[cfg(feature = "cuda")]
pub(crate) const BENCH_CUDA: &str = "\
Examples:
  leasehold bench cuda
  leasehold bench cuda --ordinal 1 --samples 101 --json";

pub(crate) const BENCH_COLLECTIVE: &str = "\
Examples:
  leasehold bench collective --device cpu:0 --ranks 4       ranks as threads
  leasehold bench collective --device cuda:0 --sim          over a simulated driver
  leasehold bench collective --device cuda:0 --beside raw   two GPUs, beside NCCL's own calls";

pub(crate) const BENCH_DECODE: &str = "\
Examples:
  leasehold bench decode
  leasehold bench decode --model DIR --device cuda:0 --dtype bf16 --prompt 1000
  leasehold bench decode --config config.json --random-weights  a shape without weights
  leasehold bench decode --batch 8                               eight sequences together
  leasehold bench decode --batch 8 --join 1000                   how long they wait for a prompt
  leasehold bench decode --device cuda --ranks 2 --dtype bf16    two ranks beside one";

pub(crate) const BENCH_SUSPEND: &str = "\
Examples:
  leasehold bench suspend --rounds 10
  leasehold bench suspend --device cuda:0 --model DIR --json";

pub(crate) const BENCH_MEMORY: &str = "\
Examples:
  leasehold bench memory
  leasehold bench memory --threads 4 --json";

pub(crate) const CONFORMANCE: &str = "\
Examples:
  leasehold conformance                                on the CPU
  leasehold conformance --device cuda:0 --sim          over a simulated driver
  leasehold conformance --filter 61,80-89,overlap      some cases, by number and by words
  leasehold conformance --filter collective            those about collectives between ranks";

pub(crate) const STRESS: &str = "\
Examples:
  leasehold stress --device sim:0 --seeds 100          a hundred programs
  leasehold stress --device cuda:0 --sim --faults      with failing and late calls
  leasehold stress --device sim:0 --ranks 4 --seeds 50  four ranks, with collectives
  leasehold stress --device sim:0 --through c --seeds 10  each step by calls of the C ABI
  leasehold stress --seed 7 --ops 1000 --threads 2     one program again";

pub(crate) const COMPLETIONS: &str = "\
Examples:
  leasehold completions bash  written into a file that bash-completion reads
  leasehold completions zsh   written into a file _leasehold of $fpath
  leasehold completions fish";

pub(crate) const MAN: &str = "\
Examples:
  leasehold man           the page of the command, for `man -l -`
  leasehold man man/man1  a page of each command into a folder";

#[cfg(test)]
mod tests {
    use crate::Arguments;
    use clap::{Command, CommandFactory, Parser};

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

    fn visit(command: &Command, path: &str) -> usize {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let examples: Vec<_> = help.lines().filter(|l| l.starts_with("  leasehold")).collect();
        assert!(!examples.is_empty() || path == "leasehold", "{path}: no example in its help");
        for line in &examples {
            let call = words(line);
            assert!(line.trim().starts_with(path), "{path}: {line}");
            if let Err(e) = Arguments::try_parse_from(&call) {
                panic!("{path}: the example {call:?} is refused: {e}");
            }
        }
        let below = command.get_subcommands().filter(|c| c.get_name() != "help");
        examples.len() + below.map(|c| visit(c, &format!("{path} {}", c.get_name()))).sum::<usize>()
    }

    #[test]
    fn every_command_has_examples_and_takes_them() {
        assert!(visit(&Arguments::command(), "leasehold") > 30);
    }
}
