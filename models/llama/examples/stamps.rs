//! Times of a decode step with kernels from a folder of images, and of each kernel in it if the
//! images have stamps.
//!
//! ```sh
//! target/nvrtc/bin/python bench/stamps.py stamped FOLDER
//! cargo run --release -p leasehold-llama --features leasehold/cuda --example stamps -- \
//!     CONFIG FOLDER ...
//! ```
//! It needs a device of compute capability 9.0, for which the images are.
//!
//! `CONFIG` is the config.json of a model, which gets random weights in bf16. The program launches
//! a graph of one sequence's step many times, without a wait in between. It prints the time of a
//! step, and a hash of the last logits, which kernels with equal results have in common.
//!
//! With stamps it then prints a table. A line is a kernel and the one in front of it, of which a
//! step has `times` launches of `blocks` blocks. The other columns are microseconds since the last
//! end of the kernel in front, means over the launches: the first begin of a block, the first and
//! the last one past its wait, the first and the last end. The lines' last ends times their
//! launches are the step. A block's times are those of its first thread, and stamps take time.

use leasehold::kernel::{Cubin, KernelSource};
use leasehold::{DeviceId, Graph, Runtime, View};
use leasehold_llama::{Config, DType, Decoder, Model, Sampling, Weights};
use leasehold_operators::Library;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// The address of the log stands here in an image with stamps (`bench/stamps.py`).
const PLACE: u64 = 0x5F6C_6F67_5F70_6D73;
/// The most stamps of a log.
const STAMPS: usize = 1 << 20;
const PROMPT: u32 = 16;
/// Steps of a round, and rounds.
const STEPS: usize = 32;
const ROUNDS: usize = 7;
/// Steps with stamps.
const STAMPED: usize = 4;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((config, folders)) = arguments.split_first().filter(|(_, rest)| !rest.is_empty())
    else {
        eprintln!("usage: stamps CONFIG FOLDER ...");
        return ExitCode::from(2);
    };
    for folder in folders {
        if let Err(error) = run(config.as_ref(), folder.as_ref()) {
            eprintln!("stamps: {folder}: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// The machine code of `folder` for device `of`, by module, with the log's address in place.
fn images(folder: &Path, of: (u32, u32), log: u64) -> Result<HashMap<String, Cubin<'static>>> {
    let mut images = HashMap::new();
    for file in std::fs::read_dir(folder)? {
        let path = file?.path();
        let Some(module) =
            path.file_stem().filter(|_| path.extension().is_some_and(|e| e == "cubin"))
        else {
            continue;
        };
        let mut image = std::fs::read(&path)?;
        let place = PLACE.to_le_bytes();
        if let Some(at) = image.windows(place.len()).position(|bytes| bytes == place) {
            image[at..at + place.len()].copy_from_slice(&log.to_le_bytes());
        }
        // SAFETY: the caller of this program vouches that the folder has the compiler's output.
        let cubin = unsafe { Cubin::new(of, Cow::Owned(image)) };
        images.insert(format!("{}.cu", module.to_string_lossy()), cubin);
    }
    Ok(images)
}

fn run(config: &Path, folder: &Path) -> Result<()> {
    let names = std::fs::read_to_string(folder.join("kernels.txt")).unwrap_or_default();
    let names: Vec<&str> = names.lines().collect();
    let config = Config::from_file(config)?;
    let weights = Weights::random_of_one_layer(&config, DType::Bf16, 1)?;
    let runtime = Runtime::open(DeviceId::cuda(0))?;
    let log = runtime.zeros::<u64>(2 + 2 * STAMPS)?;
    runtime.synchronize()?;
    let images = images(folder, (9, 0), log.view().addr())?;
    let source = |module: &leasehold_operators::kernels::cuda::Module| {
        images.get(module.name).map_or_else(
            || module.kernel_source(),
            |image| KernelSource::Cubins {
                images: Box::leak(Box::new([image.clone()])),
                ptx: Cow::Borrowed(""),
            },
        )
    };
    // SAFETY: the folder's images are compiled from the modules' sources; stamps write the log,
    // which lives as long as the runtime's work.
    runtime.extension(|runtime| unsafe { Library::with_sources(runtime, &source) })?;
    let model = Model::load(&runtime, &config, &weights, DType::Bf16, &mut |_, _| {})?;
    drop(weights);
    let prompt: Vec<u32> = (0..PROMPT).map(|i| i * 97 + 221).collect();
    let positions = prompt.len() + STEPS + 1;
    let mut decoder = Decoder::new(&model, positions, 1, Sampling::default())?;
    decoder.prefill(&prompt)?;
    decoder.step()?;
    let graph = decoder.record()?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        decoder.prefill(&prompt)?;
        // The first launch uploads the graph.
        launch(&runtime, &mut decoder, &graph, 1)?;
        let begin = Instant::now();
        launch(&runtime, &mut decoder, &graph, STEPS - 1)?;
        times.push(begin.elapsed().as_secs_f64() * 1e6 / (STEPS - 1) as f64);
    }
    times.sort_by(f64::total_cmp);
    let mut hash = DefaultHasher::new();
    decoder.logits()?.iter().for_each(|v| v.to_bits().hash(&mut hash));
    let (least, median, most) = (times[0], times[ROUNDS / 2], times[ROUNDS - 1]);
    println!(
        "{}: {median:.1} us a step ({least:.1} to {most:.1}), logits {:016x}",
        folder.display(),
        hash.finish()
    );
    if names.is_empty() {
        return Ok(());
    }
    decoder.prefill(&prompt)?;
    launch(&runtime, &mut decoder, &graph, 2)?;
    runtime.stream().upload(log.slice(0..2).view(), &[0, STAMPS as u64])?;
    runtime.synchronize()?;
    launch(&runtime, &mut decoder, &graph, STAMPED)?;
    let words = runtime.to_vec(&log)?;
    let count = words[0] as usize;
    if count > STAMPS {
        return Err(format!("{count} stamps, and the log has {STAMPS} places").into());
    }
    let launches = launches(words[2..2 + 2 * count].as_chunks().0, names.len())?;
    print(&launches, &names);
    Ok(())
}

/// Launches the graph `times` times and waits for the last one.
fn launch(runtime: &Runtime, decoder: &mut Decoder, graph: &Graph, times: usize) -> Result<()> {
    for _ in 0..times {
        decoder.launch(graph)?;
    }
    Ok(runtime.synchronize()?)
}

/// The first and the last time of a launch's blocks, in nanoseconds.
#[derive(Clone, Copy)]
struct Span {
    first: u64,
    last: u64,
}

impl Span {
    fn add(&mut self, at: u64) {
        *self = Self { first: self.first.min(at), last: self.last.max(at) };
    }
}

/// A launch of a kernel: begins, times past the wait, and ends.
struct Launch {
    kernel: usize,
    blocks: usize,
    at: [Span; 3],
}

/// The launches in order. A launch has one block of each number, so a block's turn among those of
/// its kernel and number is its launch's turn.
fn launches(stamps: &[[u64; 2]], kernels: usize) -> Result<Vec<Launch>> {
    const BROKEN: &str = "the log has a stamp of no block: are all images of one folder?";
    // The blocks that run, by processor and warp, and the turns, by kernel and number.
    let (mut open, mut turns) = (HashMap::new(), HashMap::new());
    let mut launches: BTreeMap<(usize, usize), Launch> = BTreeMap::new();
    for &[now, word] in stamps {
        let (what, kernel) = (word & 255, (word >> 8 & 255) as usize);
        let (place, number) = (word >> 16 & 0xffff, word >> 32);
        match what {
            0 => drop(open.insert(place, [now, 0])),
            1 => open.get_mut(&place).ok_or(BROKEN)?[1] = now,
            _ => {
                let [begin, waited] = open.remove(&place).ok_or(BROKEN)?;
                if kernel >= kernels || waited == 0 {
                    return Err(BROKEN.into());
                }
                let turn: &mut usize = turns.entry((kernel, number)).or_default();
                let at = [begin, waited, now];
                let spans = at.map(|at| Span { first: at, last: at });
                let launch = Launch { kernel, blocks: 0, at: spans };
                let launch = launches.entry((kernel, *turn)).or_insert(launch);
                launch.blocks += 1;
                launch.at.iter_mut().zip(at).for_each(|(span, at)| span.add(at));
                *turn += 1;
            }
        }
    }
    let mut launches: Vec<Launch> = launches.into_values().collect();
    launches.sort_by_key(|launch| launch.at[1].first);
    Ok(launches)
}

/// A line of the table.
struct Line {
    /// The kernel in front, and the kernel.
    kernels: [usize; 2],
    launches: usize,
    blocks: usize,
    /// Of the columns.
    sums: [f64; 5],
}

fn print(launches: &[Launch], names: &[&str]) {
    let mut lines: Vec<Line> = Vec::new();
    for pair in launches.windows(2) {
        let (before, launch) = (&pair[0], &pair[1]);
        let kernels = [before.kernel, launch.kernel];
        let [begin, waited, end] = launch.at;
        let found = lines.iter().position(|line| line.kernels == kernels);
        let at = found.unwrap_or(lines.len());
        if found.is_none() {
            lines.push(Line { kernels, launches: 0, blocks: launch.blocks, sums: [0.0; 5] });
        }
        lines[at].launches += 1;
        let columns = [begin.first, waited.first, waited.last, end.first, end.last];
        for (sum, at) in lines[at].sums.iter_mut().zip(columns) {
            *sum += (at as f64 - before.at[2].last as f64) / 1e3;
        }
    }
    println!("kernel in front    kernel             times blocks  begin  waited         ends");
    let mut step = 0.0;
    for Line { kernels, launches, blocks, sums } in lines {
        let [before, kernel] = kernels.map(|kernel| names[kernel]);
        let [begin, first_waited, last_waited, first_end, last_end] =
            sums.map(|sum| sum / launches as f64);
        let each = launches as f64 / STAMPED as f64;
        step += last_end * each;
        println!(
            "{before:18} {kernel:18} {each:5.2} {blocks:6} {begin:6.2} {first_waited:6.2} {last_waited:6.2} \
             {first_end:6.2} {last_end:6.2}"
        );
    }
    println!("a step with stamps: {step:.1} us");
}
