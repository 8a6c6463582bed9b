//! Traces of the recorded kinds with other shapes: made by rule from a seed, so that what the
//! allocator promises is not a property of the four recorded ones.

use crate::model::Rng;
use leasehold_alloc::Policy;
use leasehold_sim::memory::replay::{Options, replay_virtual};
use leasehold_sim::memory::trace::{Event, Trace};

/// Puts a trace together.
#[derive(Default)]
pub(crate) struct Maker {
    events: Vec<Event>,
    sizes: Vec<u64>,
    live: u64,
    peak: u64,
    streams: u32,
}

impl Maker {
    pub(crate) fn alloc(&mut self, size: u64, stream: u16) -> u32 {
        let id = self.sizes.len() as u32;
        self.sizes.push(size);
        self.live += size;
        self.peak = self.peak.max(self.live);
        self.streams = self.streams.max(u32::from(stream) + 1);
        self.events.push(Event { t_us: self.events.len() as u64, alloc: true, id, size, stream });
        id
    }

    pub(crate) fn free(&mut self, id: u32, stream: u16) {
        let size = self.sizes[id as usize];
        self.live -= size;
        self.events.push(Event { t_us: self.events.len() as u64, alloc: false, id, size, stream });
    }

    /// Something that lives for a moment.
    pub(crate) fn brief(&mut self, size: u64) {
        let id = self.alloc(size, 0);
        self.free(id, 0);
    }

    pub(crate) fn trace(self) -> Trace {
        Trace {
            events: self.events,
            allocations: self.sizes.len() as u32,
            streams: self.streams,
            peak: self.peak,
        }
    }
}

/// Training: weights, gradients and two moments that stay, activations that grow through the
/// forward pass and shrink through the backward pass, with workspaces and temporaries in between.
/// `varying`: another batch shape in each step.
pub(crate) fn training(seed: u64, varying: bool) -> Trace {
    let mut rng = Rng(seed * 0x9E37_79B9 + 1);
    let mut m = Maker::default();
    let layers = 12 + rng.below(20);
    let width = 512 + 64 * rng.below(12);
    // Most of a layer's tensors are a few multiples of tokens × width.
    let kinds: Vec<[u64; 6]> = (0..layers)
        .map(|_| {
            let wide = 1 + rng.below(4);
            [1, wide, 4, 1, wide.max(2), 3 + rng.below(3)].map(|k| k * width * 4)
        })
        .collect();
    for _ in 0..layers {
        for k in [4 * width * width, 4 * width * width, 16 * width * width, width * 4, width * 4] {
            m.alloc(k, 0);
        }
    }
    let mut moments = Vec::new();
    for step in 0..6 {
        let tokens =
            if varying { 256 * (4 + rng.below(28)) + rng.below(64) } else { 256 * (8 + seed % 16) };
        let mut kept = Vec::new();
        for kind in &kinds {
            for (i, k) in kind.iter().enumerate() {
                let size = k * tokens;
                if i % 3 == 1 {
                    m.brief(size / 2 + rng.below(3) * 4096);
                    m.brief(4096 + rng.below(8) * 512);
                }
                let id = m.alloc(size / (1 + i as u64 % 2), 0);
                kept.push(id);
                if i == 4 {
                    // A mask beside the activation.
                    kept.push(m.alloc(size / 4, 0));
                }
                m.brief(8 << 20);
                m.brief(512 + rng.below(4) * 256);
            }
        }
        let mut gradients = Vec::new();
        let mut carried = m.alloc(width * 4 * tokens, 0);
        for kind in kinds.iter().rev() {
            for k in kind {
                let next = m.alloc(k * tokens / 2, 0);
                m.brief(k * tokens / 2);
                m.free(carried, 0);
                carried = next;
                if let Some(id) = kept.pop() {
                    m.free(id, 0);
                }
                m.brief(2048);
            }
            if let Some(id) = kept.pop() {
                m.free(id, 0);
            }
            for k in
                [4 * width * width, 4 * width * width, 16 * width * width, width * 4, width * 4]
            {
                gradients.push((m.alloc(k, 0), k));
            }
        }
        m.free(carried, 0);
        kept.drain(..).for_each(|id| m.free(id, 0));
        for (id, k) in gradients {
            if step == 0 {
                moments.push(m.alloc(k, 0));
                moments.push(m.alloc(k, 0));
            }
            m.brief(k);
            m.free(id, 0);
        }
    }
    m.trace()
}

/// Decoding: weights, then for every prompt a prefill and tokens one by one; the cache of keys and
/// values grows by copying, layer by layer.
pub(crate) fn decoding(seed: u64) -> Trace {
    let mut rng = Rng(seed * 0x2545_F491 + 1);
    let mut m = Maker::default();
    let layers = 8 + rng.below(10);
    let width = (3 + rng.below(6)) * 256;
    for _ in 0..layers {
        for k in [2, 2, 2, 2, 5, 5, 5] {
            m.alloc(k * width * width, 0);
        }
    }
    let head = m.alloc(width * (20_000 + 1_000 * rng.below(12)) * 2, 0);
    for _ in 0..3 {
        let batch = 1 + rng.below(6);
        let first = 64 + rng.below(400);
        let mut cache: Vec<[u32; 2]> = Vec::new();
        for len in first..first + 100 + rng.below(80) {
            let rows = if len == first { len * batch } else { batch };
            let mut hidden = m.alloc(rows * width * 4, 0);
            for layer in 0..layers as usize {
                m.brief(rows * width * 4);
                let q = m.alloc(rows * width * 4, 0);
                let grown = [(); 2].map(|()| m.alloc(len * batch * width, 0));
                match cache.get_mut(layer) {
                    Some(old) => {
                        std::mem::replace(old, grown).into_iter().for_each(|id| m.free(id, 0))
                    }
                    None => cache.push(grown),
                }
                let scores = m.alloc(rows * len * 8 * 4, 0);
                m.brief(rows * len * 8 * 4);
                m.free(q, 0);
                m.free(scores, 0);
                let up = m.alloc(rows * width * 10, 0);
                m.brief(rows * width * 10);
                m.brief(64);
                let next = m.alloc(rows * width * 4, 0);
                m.free(up, 0);
                m.free(hidden, 0);
                hidden = next;
            }
            m.brief(batch * 30_000 * 4);
            m.brief(batch * 30_000 * 2);
            m.free(hidden, 0);
        }
        cache.into_iter().flatten().for_each(|id| m.free(id, 0));
    }
    m.free(head, 0);
    m.trace()
}

/// Four streams: 64 blocks of sizes over five decades, one replaced after the other, each with a
/// twin that lives for a moment only.
pub(crate) fn streams(seed: u64) -> Trace {
    let mut rng = Rng(seed * 0x1234_5677 + 1);
    let mut m = Maker::default();
    let mut kept: Vec<(u32, u16)> = Vec::new();
    let mut brief: Vec<(u32, u16)> = Vec::new();
    for _ in 0..9_000 {
        let stream = rng.below(4) as u16;
        let decades = 10.9 * rng.below(1 << 20) as f64 / f64::from(1 << 20);
        let size = (300.0 * decades.exp()) as u64 & !3;
        kept.push((m.alloc(size, stream), stream));
        brief.push((m.alloc(size, stream), stream));
        if brief.len() > 2 {
            let (id, stream) = brief.remove(0);
            m.free(id, stream);
        }
        if kept.len() > 64 {
            let (id, stream) = kept.swap_remove(rng.below(64) as usize);
            m.free(id, stream);
        }
    }
    m.trace()
}

/// The promise for a kind of trace: the ratio at the default policy and under the compact one, a
/// budget that suffices, rest.
struct Promise {
    ratio: f64,
    compact: f64,
    budget: f64,
    rests: bool,
}

fn kept(kind: &str, promise: &Promise, make: impl Fn(u64) -> Trace) {
    for seed in 1..=5 {
        let t = make(seed);
        let play = |options: Options| replay_virtual(&t, &options).expect("a replay");
        let r = play(Options::default());
        assert!(r.failed == 0 && r.ratio <= promise.ratio, "{kind} {seed}: {r:?}");
        let compact = Options { policy: Policy::Compact, ..Options::default() };
        let r = play(compact.clone());
        assert!(r.failed == 0 && r.ratio <= promise.compact, "{kind} {seed}, compact: {r:?}");
        let r = play(Options { budget: Some(promise.budget), ..compact });
        assert_eq!(r.failed, 0, "{kind} {seed} does not complete with {}: {r:?}", promise.budget);
        if promise.rests {
            let r = play(Options { repeat: 3, budget: Some(1.15), ..Options::default() });
            assert_eq!(
                (r.failed, r.driver_calls.steady),
                (0, 0),
                "{kind} {seed} does not come to rest: {r:?}"
            );
        }
    }
}

#[test]
fn other_trainings_keep_the_bounds() {
    let promise = Promise { ratio: 1.03, compact: 1.01, budget: 1.01, rests: true };
    kept("training", &promise, |seed| training(seed, false));
    kept("training of varying shapes", &promise, |seed| training(seed, true));
}

#[test]
fn other_decodings_keep_the_bounds() {
    let promise = Promise { ratio: 1.05, compact: 1.03, budget: 1.035, rests: true };
    kept("decoding", &promise, decoding);
}

#[test]
fn other_mixes_of_four_streams_keep_the_bounds() {
    let promise = Promise { ratio: 1.5, compact: 1.30, budget: 1.30, rests: false };
    kept("four streams", &promise, streams);
}
