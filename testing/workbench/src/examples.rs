//! The examples of the help, one text per command. A test parses each line.

pub(crate) const RUN: &str = "\
Examples:
  leasehold-workbench run                                       the bundled model, on the CPU
  leasehold-workbench run --device cuda:0 --prompt 'import os'  on a GPU
  leasehold-workbench run --model DIR --dtype bf16 --json       a Hugging Face directory, for a program
  leasehold-workbench run --report memory.html                  a page about the memory
  leasehold-workbench run --device cuda:0 --sim                 without a GPU
  leasehold-workbench run --device cuda:0 --check               ends at logits that are NaN or infinite
  leasehold-workbench run --device cuda --ranks 2               a model over two GPUs
  leasehold-workbench run --ranks 2                             the same with two threads on the CPU";

pub(crate) const REPLAY: &str = "\
Examples:
  leasehold-workbench replay trace.csv.gz                             costs and memory of a trace
  leasehold-workbench replay snapshot.pickle --find-min-budget        the least memory for PyTorch's history
  leasehold-workbench replay trace.csv.gz --peer system               the same on the process's heap
  leasehold-workbench replay trace.csv.gz --report memory.html        a page about the memory";

pub(crate) const BENCH: &str = "\
Examples:
  leasehold-workbench bench lease                          handles and leases, with limits
  leasehold-workbench bench decode --model DIR --json      tokens per second of a model
  leasehold-workbench bench cuda --samples 101             overhead over the driver's own calls";

pub(crate) const BENCH_ALLOC: &str = "\
Examples:
  leasehold-workbench bench alloc --workload mixed --threads 1,8
  leasehold-workbench bench alloc --trace trace.csv.gz --rounds 3";

pub(crate) const BENCH_COPY: &str = "\
Examples:
  leasehold-workbench bench copy
  leasehold-workbench bench copy --device cuda:0 --kib 64,65536";

pub(crate) const BENCH_LEASE: &str = "\
Examples:
  leasehold-workbench bench lease
  leasehold-workbench bench lease --json";

pub(crate) const BENCH_STREAM: &str = "\
Examples:
  leasehold-workbench bench stream
  leasehold-workbench bench stream --threads 2 --json";

pub(crate) const BENCH_GRAPH: &str = "\
Examples:
  leasehold-workbench bench graph
  leasehold-workbench bench graph --nodes 10000 --threads 2";

#[cfg(feature = "cuda")]
pub(crate) const BENCH_CUDA: &str = "\
Examples:
  leasehold-workbench bench cuda
  leasehold-workbench bench cuda --ordinal 1 --samples 101 --json";

pub(crate) const BENCH_COLLECTIVE: &str = "\
Examples:
  leasehold-workbench bench collective --device cpu:0 --ranks 4       ranks as threads
  leasehold-workbench bench collective --device cuda:0 --sim          over a simulated driver
  leasehold-workbench bench collective --device cuda:0 --beside raw   two GPUs, beside NCCL's own calls";

pub(crate) const BENCH_DECODE: &str = "\
Examples:
  leasehold-workbench bench decode
  leasehold-workbench bench decode --model DIR --device cuda:0 --dtype bf16 --prompt 1000
  leasehold-workbench bench decode --config config.json --random-weights  a shape without weights
  leasehold-workbench bench decode --batch 8                               eight sequences together
  leasehold-workbench bench decode --batch 8 --join 1000                   how long they wait for a prompt
  leasehold-workbench bench decode --device cuda --ranks 2 --dtype bf16    two ranks beside one";

pub(crate) const BENCH_SUSPEND: &str = "\
Examples:
  leasehold-workbench bench suspend --rounds 10
  leasehold-workbench bench suspend --device cuda:0 --model DIR --json";

pub(crate) const BENCH_MEMORY: &str = "\
Examples:
  leasehold-workbench bench memory
  leasehold-workbench bench memory --threads 4 --json";

pub(crate) const CONFORMANCE: &str = "\
Examples:
  leasehold-workbench conformance                                on the CPU
  leasehold-workbench conformance --device cuda:0 --sim          over a simulated driver
  leasehold-workbench conformance --filter 61,80-89,overlap      some cases, by number and by words
  leasehold-workbench conformance --filter collective            those about collectives between ranks";

pub(crate) const STRESS: &str = "\
Examples:
  leasehold-workbench stress --device sim:0 --seeds 100          a hundred programs
  leasehold-workbench stress --device cuda:0 --sim --faults      with failing and late calls
  leasehold-workbench stress --device sim:0 --ranks 4 --seeds 50  four ranks, with collectives
  leasehold-workbench stress --device sim:0 --through c --seeds 10  each step by calls of the C ABI
  leasehold-workbench stress --seed 7 --ops 1000 --threads 2     one program again";

#[cfg(feature = "cuda")]
pub(crate) const MAPS: &str = "\
Examples:
  leasehold-workbench maps --device cuda:0                       ten thousand maps on a GPU
  leasehold-workbench maps --sim --maps 200                      over a simulated driver
  leasehold-workbench maps --sim --seed 7 --maps 1               one map again";
