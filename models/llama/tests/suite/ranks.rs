//! Models that are divided over several ranks, against transformers' results and against the same
//! model on one rank.

use super::{Golden, golden, model_dir, model_dirs, weights_of};
use leasehold::{Context, DeviceId, Runtime};
use leasehold_collective::{Comm, CommConfig, World};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_llama::{
    Batch, Config, DType, Decoder, Drawn, Mode, Model, Part, Request, Sampling, Weights, generate,
};
use leasehold_sim::collective::SimCollectives;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{KernelRegistry, MachineConfig, Monitor, SimBackend};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Over {
    Cpu,
    Sim,
    Cuda,
}

/// The longest time that a rank waits for the others.
const LIMIT: Duration = Duration::from_secs(20);

/// The devices of some ranks.
struct Ranks {
    runtimes: Vec<Runtime>,
    config: CommConfig,
    machine: Option<Monitor>,
    library: Option<Arc<SimCollectives>>,
}

impl Ranks {
    fn new(over: Over, ranks: u32, seed: u64) -> Self {
        let kernels = KernelRegistry::new();
        leasehold_operators::simulate(&kernels).unwrap();
        let machine = MachineConfig::seed(seed).devices(ranks, 1 << 28).kernels(kernels);
        let config = CommConfig::new("tp").timeout(LIMIT);
        let on = |context: &Context, kind: &str| -> Vec<Runtime> {
            let of = |rank| context.runtime(format!("{kind}:{rank}").parse().unwrap()).unwrap();
            (0..ranks).map(of).collect()
        };
        match over {
            Over::Cpu => {
                let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
                let stream = |_| runtime.create_stream().unwrap().runtime();
                let runtimes = (0..ranks).map(stream).collect();
                Self { runtimes, config, machine: None, library: None }
            }
            Over::Sim => {
                let backend = Arc::new(SimBackend::new(machine).unwrap());
                let library = Arc::new(SimCollectives::of_sim(&backend));
                let machine = Some(backend.machine().clone());
                let context = Context::with_backends(vec![backend]);
                let (runtimes, config) = (on(&context, "sim"), config.ops(library.clone()));
                Self { runtimes, config, machine, library: Some(library) }
            }
            Over::Cuda => {
                let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine)).unwrap());
                let library = Arc::new(SimCollectives::of_cuda(&driver));
                let machine = Some(driver.machine().clone());
                let cuda = CudaBackend::with_ops(driver, CudaConfig::default()).unwrap();
                let context = Context::with_backends(vec![Arc::new(cuda)]);
                let (runtimes, config) = (on(&context, "cuda"), config.ops(library.clone()));
                Self { runtimes, config, machine, library: Some(library) }
            }
        }
    }

    /// Runs a function as each rank. No race may be found.
    fn run<T: Send>(&self, rank: impl Fn(&Comm) -> T + Sync) -> Vec<T> {
        let worlds = World::threads(self.runtimes.len() as u32).unwrap();
        let results = thread::scope(|scope| {
            let start = |(world, runtime): (World, &Runtime)| {
                let (runtime, rank, config) = (runtime.clone(), &rank, &self.config);
                scope.spawn(move || rank(&world.comm(&runtime, config).unwrap()))
            };
            let all: Vec<_> = worlds.into_iter().zip(&self.runtimes).map(start).collect();
            all.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        if let Some(machine) = &self.machine {
            let reports = machine.take_reports();
            assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
        }
        results
    }
}

fn files(dir: &Path) -> (Config, Weights) {
    let config = Config::from_dir(dir).unwrap();
    let weights = weights_of(dir, &config).unwrap();
    (config, weights)
}

fn part(comm: &Comm, (config, weights): &(Config, Weights), dtype: DType) -> Model {
    Model::load_part(comm, config, weights, dtype, &mut |_, _| {}).unwrap()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|l| l.to_bits()).collect()
}

fn near(what: &str, ours: &[f32], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len());
    let largest = theirs.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    let pairs = ours.iter().zip(theirs);
    let worst = pairs.fold(0.0, |m: f64, (&a, b)| m.max((f64::from(a) - b).abs()));
    assert!(worst <= 5e-4 * largest, "{what}: {worst} of {largest}");
}

/// A rank's results of a prompt: ids and logits, eager and replayed.
type Both = [(Vec<u32>, Vec<f32>); 2];

fn both(model: &Model, case: &Golden, most: usize) -> Both {
    [Mode::Eager, Mode::Graph].map(|mode| {
        let request = Request {
            prompt: &case.prompt_ids,
            tokens: case.greedy.len().min(most),
            mode,
            sampling: Sampling::default(),
            stop_at: &[],
            check: false,
        };
        let text = generate(model, &request, &mut |_| Ok(())).unwrap();
        (text.ids, text.last_logits)
    })
}

/// Compares the prompts of a model with transformers' results, on each rank.
fn same_as_transformers(over: Over, ranks: u32, dir: &Path, most: usize) {
    let (files, cases) = (files(dir), golden(dir));
    let of_ranks = Ranks::new(over, ranks, 5).run(|comm| -> Vec<Both> {
        let model = part(comm, &files, DType::F32);
        cases.iter().map(|case| both(&model, case, most)).collect()
    });
    let name = format!("{over:?}, {ranks} ranks, {}", dir.display());
    for (at, case) in cases.iter().enumerate() {
        let first = &of_ranks[0][at];
        for rank in &of_ranks {
            for (ids, logits) in &rank[at] {
                assert_eq!(*ids, first[0].0, "{name}: equal over ranks and modes");
                assert!(bits(logits) == bits(&first[0].1), "{name}: equal to the bit");
            }
        }
        assert_eq!(first[0].0, case.greedy[..case.greedy.len().min(most)], "{name}");
        near(&name, &first[0].1, &case.last_logits);
    }
}

/// The golden models that so many ranks divide.
fn divided_by(ranks: u32) -> Vec<PathBuf> {
    let divides = |dir: &PathBuf| {
        let config = Config::from_dir(dir).unwrap();
        Part::new(0, ranks).unwrap().config(&config).is_ok()
    };
    model_dirs().into_iter().filter(divides).collect()
}

#[test]
fn two_ranks_on_the_cpu_give_the_results_of_transformers() {
    let all = divided_by(2);
    assert!(all.len() >= 15, "{all:?}");
    all.iter().for_each(|dir| same_as_transformers(Over::Cpu, 2, dir, usize::MAX));
}

/// Their key and value heads are two, so each is on two ranks.
#[test]
fn four_ranks_repeat_key_and_value_heads() {
    let all = divided_by(4);
    let names = ["mistral", "qwen2", "qwen3", "demo-model", "model"];
    let known = |name: &&&str| all.iter().any(|dir| dir.ends_with(name));
    assert!(names.iter().filter(known).count() >= 4, "{all:?}");
    all.iter().for_each(|dir| same_as_transformers(Over::Cpu, 4, dir, usize::MAX));
}

/// Devices of their own, whose memory the host cannot access, with the race detector on.
#[test]
fn four_simulated_devices_give_the_results_of_transformers() {
    for name in ["demo-model", "qwen3"] {
        same_as_transformers(Over::Sim, 4, &model_dir(name), 12);
    }
}

#[test]
fn four_simulated_cuda_devices_give_the_results_of_transformers() {
    for name in ["demo-model", "qwen2"] {
        same_as_transformers(Over::Cuda, 4, &model_dir(name), 12);
    }
}

/// The tokens that a batch has drawn, in its order, and the last logits of each sequence.
type Texts = (Vec<Vec<Drawn>>, Vec<Vec<f32>>);

/// Sequences that begin one after the other, greedy and sampled.
fn batch(model: &Model, mode: Mode) -> Texts {
    const TOKENS: usize = 6;
    let how = |seed: u64| Sampling {
        temperature: [0.0, 0.9][seed as usize % 2],
        top_k: 7,
        seed,
        log_probabilities: seed as u32 % 3,
        ..Sampling::default()
    };
    let vocabulary = model.config().vocab_size as u32;
    let mut batch = Batch::new(model, 3, 40, mode).unwrap();
    let (mut ids, mut texts, mut last) = (Vec::new(), Vec::new(), Vec::new());
    while texts.len() < 7 || !batch.is_empty() {
        if texts.len() < 7 && batch.len() < 3 {
            let (n, long) = (texts.len() as u32, [3, 30, 1][texts.len() % 3]);
            let prompt: Vec<u32> = (0..long).map(|i| (n * 31 + i * 7) % vocabulary).collect();
            ids.push(batch.add(&prompt, how(n.into())).unwrap());
            texts.push(Vec::new());
            last.push(Vec::new());
        }
        for (id, drawn) in batch.step().unwrap() {
            let at = ids.iter().position(|of| *of == id).unwrap();
            texts[at].push(drawn.unwrap());
            if texts[at].len() == TOKENS {
                last[at] = batch.logits(id).unwrap();
                batch.remove(id).unwrap();
            }
        }
    }
    (texts, last)
}

/// Prompts join sequences, eager and replayed, on each backend. Each rank draws the same.
#[test]
fn a_batch_over_ranks_draws_what_one_rank_draws() {
    for (over, name) in
        [(Over::Cpu, "demo-model"), (Over::Sim, "qwen3"), (Over::Cuda, "untied-head")]
    {
        let files = files(&model_dir(name));
        let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
        let alone = Model::load(&runtime, &files.0, &files.1, DType::F32, &mut |_, _| {}).unwrap();
        let (texts, logits) = batch(&alone, Mode::Eager);
        let tokens = |texts: &[Vec<Drawn>]| -> Vec<Vec<u32>> {
            texts.iter().map(|text| text.iter().map(|drawn| drawn.token).collect()).collect()
        };
        let of_ranks = Ranks::new(over, 2, 6).run(|comm| {
            let model = part(comm, &files, DType::F32);
            [batch(&model, Mode::Eager), batch(&model, Mode::Graph)]
        });
        let first = &of_ranks[0][0];
        for found in of_ranks.iter().flatten() {
            assert_eq!(found.0, first.0, "{over:?}: equal over ranks and modes");
            for (a, b) in found.1.iter().zip(&first.1) {
                assert!(bits(a) == bits(b), "{over:?}: equal to the bit");
            }
        }
        assert_eq!(tokens(&first.0), tokens(&texts), "{over:?} {name}");
        for (ours, theirs) in first.1.iter().zip(&logits) {
            let theirs: Vec<f64> = theirs.iter().copied().map(f64::from).collect();
            near(name, ours, &theirs);
        }
    }
}

/// In bf16, where each sum rounds: the ranks agree to the bit, and with one rank about.
#[test]
fn ranks_agree_to_the_bit_in_bf16() {
    let dir = model_dir("demo-model");
    let (files, case) = (files(&dir), &golden(&dir)[0]);
    for over in [Over::Cpu, Over::Cuda] {
        let ranks = Ranks::new(over, 2, 7);
        let all = ranks.run(|comm| both(&part(comm, &files, DType::Bf16), case, 8));
        // A step has two sums for each layer, on each rank. CUDA asks for them as it captures.
        let sums = 2 * 2 * files.0.num_hidden_layers as u64;
        let windowed = ranks.library.map(|library| library.windowed());
        assert!(windowed.is_none_or(|calls| calls >= sums), "{windowed:?} of {sums}");
        let first = &all[0][0];
        assert!(all.iter().flatten().all(|(ids, _)| *ids == first.0), "{over:?}");
        assert!(all.iter().flatten().all(|(_, l)| bits(l) == bits(&first.1)), "{over:?}");
        let largest = case.last_logits.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        for (ours, theirs) in first.1.iter().zip(&case.last_logits) {
            assert!((f64::from(*ours) - theirs).abs() < 8e-2 * largest, "{ours} and {theirs}");
        }
    }
}

/// A rank reads its own rows and columns of the weights, and nothing of the others'.
#[test]
fn a_rank_reads_its_part_of_the_weights() {
    for name in ["mistral", "biases", "demo-model"] {
        let files = files(&model_dir(name));
        let (config, weights) = &files;
        let all = weights.total_bytes();
        let of = |rank| Part::new(rank, 2).unwrap().bytes(config, weights).unwrap();
        let done = Ranks::new(Over::Sim, 2, 8).run(|comm| {
            let (mut done, before) = (0, comm.runtime().allocator().stats().allocations);
            let progress: &mut dyn FnMut(u64, u64) = &mut |so_far, total| {
                assert!(so_far > done && total == of(comm.rank()), "{so_far} of {total}");
                done = so_far;
            };
            let model = Model::load_part(comm, config, weights, DType::F32, progress).unwrap();
            assert_eq!(model.part(), Part::new(comm.rank(), 2).unwrap());
            let live = comm.runtime().allocator().stats().live;
            assert!(comm.runtime().allocator().stats().allocations > before);
            (done, live)
        });
        let mut whole = 0;
        for (tensor, stored) in weights.iter() {
            let divided = ["proj.", "lm_head"].iter().any(|part| tensor.contains(part));
            let bias_of_sum = tensor.contains("o_proj.bias") || tensor.contains("down_proj.bias");
            whole += if divided && !bias_of_sum { 0 } else { stored.bytes().len() as u64 };
        }
        for (rank, (done, live)) in done.into_iter().enumerate() {
            assert_eq!(done, of(rank as u32), "{name}: the progress ends with its total");
            // The allocator rounds sizes up.
            assert!(live < done + done / 2 + (64 << 10), "{name}: {live} for {done}");
        }
        assert_eq!(of(0) - whole, (all - whole) / 2, "{name}: half of what is divided");
    }
}

#[test]
fn what_ranks_do_not_divide_is_refused_with_the_cure() {
    let refusal = |name: &str, ranks: u32| {
        let (config, _) = files(&model_dir(name));
        Part::new(0, ranks).unwrap().config(&config).unwrap_err().to_string()
    };
    for (name, ranks, cure) in [
        ("demo-model", 3, "take 1, 2, 4 or 8 ranks"),
        ("demo-model", 16, "take 1, 2, 4 or 8 ranks"),
        ("one-kv-head", 2, "take 1 rank"),
        ("odd-sizes", 3, "feed-forward layers of 97; take 1 rank"),
        ("llama3-rope-old", 2, "3 heads of keys and values"),
    ] {
        let why = refusal(name, ranks);
        assert!(why.contains(cure) && why.contains(&format!("{ranks} ranks")), "{why}");
    }
    assert!(Part::new(2, 2).unwrap_err().to_string().contains("part 2 of 2"));
    // All ranks find it before they exchange anything.
    let files = files(&model_dir("one-kv-head"));
    let all = Ranks::new(Over::Cpu, 2, 9).run(|comm| {
        let load = Model::load_part(comm, &files.0, &files.1, DType::F32, &mut |_, _| {});
        load.unwrap_err().to_string()
    });
    assert!(all.iter().all(|why| why.contains("take 1 rank")), "{all:?}");
}

/// Ranks that compute other prompts are named before a graph is launched.
#[test]
fn a_rank_with_other_steps_is_named() {
    let files = files(&model_dir("qwen2"));
    let all = Ranks::new(Over::Cpu, 2, 10).run(|comm| {
        let model = part(comm, &files, DType::F32);
        let rows = 1 + comm.rank() as usize;
        let mut batch = Batch::new(&model, rows, 8, Mode::Graph).unwrap();
        let id = batch.add(&[1], Sampling::default()).unwrap();
        let mut failed = None;
        while failed.is_none() && batch.has_room(id).unwrap() {
            failed = batch.step().err();
        }
        failed.unwrap().to_string()
    });
    for why in all {
        assert!(why.contains("mismatch") && why.contains("layer 0, o_proj"), "{why}");
    }
}

/// The operators of a step name what the ranks exchange.
#[test]
fn a_step_has_two_sums_for_each_layer_and_one_gathering() {
    let files = files(&model_dir("qwen2"));
    let all = Ranks::new(Over::Cpu, 2, 11).run(|comm| {
        let model = part(comm, &files, DType::F32);
        Decoder::new(&model, 8, 1, Sampling::default()).unwrap().step_operators()
    });
    for counts in all {
        let of = |name| counts.iter().filter(|c| c.name == name).map(|c| c.count).sum::<usize>();
        assert_eq!(of("all_reduce"), 2 * files.0.num_hidden_layers);
        assert_eq!(of("all_gather"), 1);
        let sum = counts.iter().find(|c| c.name == "all_reduce").unwrap();
        assert_eq!((sum.computed_by, &*sum.shape), ("communicator", "rows 1, cols 32, ranks 2"));
    }
}
