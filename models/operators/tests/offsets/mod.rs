//! Every operator with operands that begin at an offset, against the same operator with buffers of
//! their own, on each backend.

use leasehold::{Array, Context, DeviceId, GraphOperator, Result, Runtime, View};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_operators::kernels::cpu::KERNELS;
use leasehold_operators::kernels::cpu::check::NotFiniteParams;
use leasehold_operators::kernels::cpu::rope::table;
use leasehold_operators::ops::{Cache, Heads, Loop, Norm, Projection, RowPositions, Sampling};
use leasehold_operators::{BufferPart, DType, Library, Operator, Tensor, ops};
use leasehold_sim::cuda::{SimDriver as CudaDriver, SimDriverConfig as CudaDriverConfig};
use leasehold_sim::mps::{SimDriver as MpsDriver, SimDriverConfig as MpsDriverConfig};
use leasehold_sim::{KernelRegistry, MachineConfig, SimBackend};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Words before and after an operand that shares its buffer.
const CANARY: u32 = 0x7fc0_dead;
const FRONT: usize = 5;
const BACK: usize = 3;
/// Rows before and after those of a matrix that is a part of another one.
const ROWS: u32 = 2;

const HEADS: Heads = Heads { heads: 2, kv_heads: 1, head_dim: 8, positions: 4 };
const QUERIES: u32 = HEADS.heads * HEADS.head_dim;
const KEYS: u32 = HEADS.kv_heads * HEADS.head_dim;
const SAMPLING: Sampling =
    Sampling { temperature: 0.7, top_k: 3, top_p: 0.9, min_p: 0.1, seed: 11, log_probabilities: 2 };

/// The buffer of an operand.
struct Memory {
    buffer: Array<u32>,
    before: Vec<u32>,
    /// The words of the operand.
    operand: Range<usize>,
    /// Whether what an operator leaves there is specified.
    specified: bool,
}

/// The operands of an operator.
struct Operands<'a> {
    runtime: &'a Runtime,
    /// Whether operands lie in the middle of larger buffers.
    apart: bool,
    all: Vec<Memory>,
    seed: u32,
}

impl Operands<'_> {
    fn new(runtime: &Runtime, apart: bool) -> Operands<'_> {
        Operands { runtime, apart, all: Vec::new(), seed: 7 }
    }

    /// Memory with these words, and so many others around them.
    fn place(&mut self, front: usize, words: &[u32], back: usize) -> Result<Array<u32>> {
        let before = [&vec![CANARY; front], words, &vec![CANARY; back]].concat();
        let buffer = self.runtime.upload(&before)?;
        let operand = front..front + words.len();
        self.all.push(Memory { buffer: buffer.clone(), before, operand, specified: true });
        Ok(buffer)
    }

    fn words(&mut self, words: &[u32]) -> Result<BufferPart> {
        let (front, back) = if self.apart { (FRONT, BACK) } else { (0, 0) };
        let buffer = self.place(front, words, back)?;
        Ok(buffer.slice(front..front + words.len()).view().into())
    }

    /// Numbers from a half to one and a half.
    fn noise(&mut self, count: u32) -> Vec<u32> {
        let mut next = || {
            self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (0.5 + (self.seed >> 8) as f32 / (1 << 24) as f32).to_bits()
        };
        (0..count).map(|_| next()).collect()
    }

    fn tensor(&mut self, rows: u32, cols: u32) -> Result<Tensor> {
        let words = self.noise(rows * cols);
        if !self.apart {
            return Tensor::new(self.place(0, &words, 0)?, DType::F32, rows, cols);
        }
        // Rows of a larger matrix, which begins in the middle of a buffer.
        let around = (ROWS * cols) as usize;
        let buffer = self.place(FRONT + around, &words, around + BACK)?;
        let all = Tensor::new(buffer.slice(FRONT..).view(), DType::F32, rows + 2 * ROWS, cols)?;
        let rows = all.slice_rows(ROWS, rows)?;
        assert_eq!(rows.view().offset(), 4 * (FRONT + around) as u64);
        assert_eq!(rows.view().len(), 4 * words.len() as u64);
        Ok(rows)
    }

    fn cache(&mut self, sequences: u32) -> Result<Cache> {
        let words = sequences * HEADS.positions * KEYS;
        let (keys, values) = (self.noise(words), self.noise(words));
        Ok(Cache::contiguous(HEADS, self.words(&keys)?, self.words(&values)?, DType::F32))
    }

    fn angles(&mut self) -> Result<BufferPart> {
        let frequencies = [1.0, 0.5, 0.25, 0.125];
        let table = table(&frequencies, HEADS.positions as usize);
        self.words(&table.iter().map(|v| v.to_bits()).collect::<Vec<_>>())
    }

    /// Two rows.
    fn state(&mut self) -> Result<Loop> {
        Ok(Loop {
            token: self.words(&[77, 78])?,
            position: self.words(&[1, 5])?,
            ring: self.words(&[0; 4])?,
            count: self.words(&[2, 3])?,
        })
    }

    /// Runs the operator, and gives its operands' words before and afterwards. What lies around an
    /// operand must be as it was.
    fn run(&self, operator: &Operator, what: &str) -> Result<[Vec<Vec<u32>>; 2]> {
        operator.encode(self.runtime.stream())?;
        let (mut before, mut after) = (Vec::new(), Vec::new());
        for (i, memory) in self.all.iter().enumerate() {
            let mut now = self.runtime.to_vec(&memory.buffer)?;
            let operand: Vec<_> = now.splice(memory.operand.clone(), []).collect();
            assert!(now.iter().all(|&w| w == CANARY), "{what}: around operand {i}: {now:x?}");
            if memory.specified {
                before.push(memory.before[memory.operand.clone()].to_vec());
                after.push(operand);
            }
        }
        Ok([before, after])
    }
}

/// One of each operator.
const OPERATORS: [fn(&Library, &mut Operands<'_>) -> Result<Operator>; 24] = [
    |l, o| {
        let (x, w, n, b, y) =
            (o.tensor(2, 8)?, o.tensor(5, 8)?, o.tensor(1, 8)?, o.tensor(1, 5)?, o.tensor(2, 5)?);
        let norm = Norm { weight: &n, eps: 1e-5 };
        ops::linear(l, &x, Some(norm), Projection { weight: &w, bias: Some(&b), y: &y })
    },
    |l, o| {
        let (x, w, b, y) = (o.tensor(2, 8)?, o.tensor(5, 8)?, o.tensor(1, 5)?, o.tensor(2, 5)?);
        ops::linear_add(l, &x, None, Projection { weight: &w, bias: Some(&b), y: &y })
    },
    |l, o| {
        let x = o.tensor(2, 8)?;
        let (a, b, c) = (o.tensor(5, 8)?, o.tensor(3, 8)?, o.tensor(4, 8)?);
        let (p, q, r) = (o.tensor(2, 5)?, o.tensor(2, 3)?, o.tensor(2, 4)?);
        let to = [(&a, &p), (&b, &q), (&c, &r)];
        ops::linear3(l, &x, None, to.map(|(weight, y)| Projection { weight, bias: None, y }))
    },
    |l, o| {
        let (x, g, u, y) = (o.tensor(2, 8)?, o.tensor(5, 8)?, o.tensor(5, 8)?, o.tensor(2, 5)?);
        let to = [&g, &u].map(|weight| Projection { weight, bias: None, y: &y });
        ops::linear_gated(l, &x, None, to[0], to[1])
    },
    |l, o| {
        let (x, w, y) = (o.tensor(2, 8)?, o.tensor(1, 8)?, o.tensor(2, 8)?);
        ops::rms_norm(l, &x, &w, 1e-5, &y)
    },
    |l, o| {
        let (h, d, w, y) = (o.tensor(2, 8)?, o.tensor(2, 8)?, o.tensor(1, 8)?, o.tensor(2, 8)?);
        ops::add_rms_norm(l, &h, &d, &w, 1e-5, &y)
    },
    |l, o| {
        let (x, table, position) = (o.tensor(2, QUERIES)?, o.angles()?, o.words(&[1])?);
        ops::rope(l, &x, HEADS, RowPositions { table: &table, position: &position })
    },
    |l, o| {
        let (x, cache, position) = (o.tensor(2, KEYS)?, o.cache(1)?, o.words(&[1])?);
        ops::cache_append(l, &x, HEADS, (cache.keys(), DType::F32), &position)
    },
    |l, o| {
        let (q, k, v) = (o.tensor(2, QUERIES)?, o.tensor(2, KEYS)?, o.tensor(2, KEYS)?);
        let (cache, table, position) = (o.cache(1)?, o.angles()?, o.words(&[1])?);
        let at = RowPositions { table: &table, position: &position };
        ops::rope_append(l, [&q, &k, &v], HEADS, &cache, at)
    },
    |l, o| {
        let (q, cache, position) = (o.tensor(2, QUERIES)?, o.cache(1)?, o.words(&[1])?);
        let y = o.tensor(2, QUERIES)?;
        ops::attention(l, &q, HEADS, &cache, &position, &y)
    },
    |l, o| {
        let (q, k, v) = (o.tensor(2, QUERIES)?, o.tensor(2, KEYS)?, o.tensor(2, KEYS)?);
        let (cache, table, position) = (o.cache(2)?, o.angles()?, o.words(&[1, 2])?);
        let y = o.tensor(2, QUERIES)?;
        let scratch = ops::decode_scratch(o.runtime, HEADS, 2)?.view().len() as usize;
        let scratch = o.words(&vec![0; scratch / 4])?;
        o.all.last_mut().expect("the scratch memory").specified = false;
        let at = RowPositions { table: &table, position: &position };
        ops::decode_attention(l, [&q, &k, &v], HEADS, &cache, at, &scratch, &y)
    },
    |l, o| {
        let (ids, table, y) = (o.words(&[4, 1])?, o.tensor(6, 8)?, o.tensor(2, 8)?);
        ops::embedding(l, &ids, &table, &y)
    },
    |l, o| ops::add(l, &o.tensor(2, 8)?, &o.tensor(2, 8)?, &o.tensor(2, 8)?),
    |l, o| ops::mul(l, &o.tensor(2, 8)?, &o.tensor(2, 8)?, &o.tensor(2, 8)?),
    |l, o| ops::silu_mul(l, &o.tensor(2, 8)?, &o.tensor(2, 8)?, &o.tensor(2, 8)?),
    |l, o| ops::cast(l, &o.tensor(2, 8)?, &o.tensor(2, 8)?),
    |l, o| ops::fill(l, &o.words(&[1, 2, 3])?, 9, 4),
    |l, o| ops::copy(l, &o.tensor(2, 8)?, &o.tensor(2, 8)?),
    |l, o| ops::softmax(l, &o.tensor(2, 8)?, &o.tensor(2, 8)?),
    |l, o| ops::argmax(l, &o.tensor(2, 8)?, &o.words(&[77, 77])?),
    |l, o| ops::advance(l, &o.state()?, 1),
    |l, o| {
        let (logits, state) = (o.tensor(2, 8)?, o.state()?);
        let record = SAMPLING.record()?;
        let records: Vec<u32> = bytemuck::cast_slice(&[record; 2]).to_vec();
        let (records, logs) = (o.words(&records)?, o.words(&[0; 2 * 41])?);
        ops::next_token(l, &logits, &records, &state, Some(&logs))
    },
    |l, o| {
        let (logits, state) = (o.tensor(2, 8)?, o.state()?);
        let factor = o.words(&[2.0_f32.to_bits(); 2])?;
        let (seen, banned) = (o.words(&[1, 2])?, o.words(&[4, 8])?);
        ops::penalise(l, &logits, &state, &ops::Penalties { factor, seen, banned })
    },
    |l, o| {
        let params = NotFiniteParams::new(16, 4, 0x7f80_0000);
        let found = o.words(&[77; 4])?;
        Operator::new(l, "not_finite", &params, &[Some((&o.tensor(2, 8)?).into()), Some(found)])
    },
];

fn every_operator_honours_offsets(runtime: &Runtime) {
    let library = Library::of(runtime).expect("the library");
    let mut names = BTreeSet::new();
    for make in OPERATORS {
        let [alone, apart] = [false, true].map(|apart| {
            let mut operands = Operands::new(runtime, apart);
            let operator = make(&library, &mut operands).expect("an operator");
            let name = operator.kernel_name();
            let what = format!("{name} on {}", runtime.device());
            let [before, after] = operands.run(&operator, &what).expect("a launch");
            assert_ne!(before, after, "{what} changes something");
            names.insert(name);
            (what, after)
        });
        assert_eq!(alone, apart);
    }
    let all: BTreeSet<_> = KERNELS.iter().map(|k| k.name).collect();
    assert_eq!(names, all, "an operator is left out");
}

#[test]
fn every_operator_honours_offsets_on_the_cpu() {
    every_operator_honours_offsets(&Runtime::open(DeviceId::cpu(0)).expect("the device"));
}

#[test]
fn every_operator_honours_offsets_on_simulated_devices() {
    let machine = |seed, register: fn(&KernelRegistry) -> Result<()>| {
        let kernels = KernelRegistry::new();
        register(&kernels).expect("the kernels");
        MachineConfig::seed(seed).kernels(kernels)
    };
    let own = SimBackend::new(machine(21, leasehold_operators::simulate)).expect("a machine");
    let cuda = machine(22, leasehold_operators::simulate);
    let cuda = CudaDriver::new(CudaDriverConfig::new(cuda)).expect("a driver");
    let cuda = CudaBackend::with_ops(Arc::new(cuda), CudaConfig::default()).expect("a backend");
    let metal = machine(23, leasehold_operators::simulate_mps);
    let metal = MpsDriver::new(MpsDriverConfig::new(metal)).expect("a driver");
    let metal = MpsBackend::with_ops(Arc::new(metal), MpsConfig::default()).expect("a backend");
    let context = Context::with_backends(vec![Arc::new(own), Arc::new(cuda), Arc::new(metal)]);
    for name in ["sim:0", "cuda:0", "mps:0"] {
        let id = context.device_id(name).expect("a name");
        every_operator_honours_offsets(&context.runtime(id).expect("the device"));
    }
}

#[test]
fn a_tensor_lies_in_the_part_that_it_is_given() {
    let runtime = Runtime::open(DeviceId::cpu(0)).expect("the device");
    let values = runtime.upload(&(0..20).map(|i| i as f32).collect::<Vec<_>>()).expect("values");
    let view = |t: &Tensor| (t.view().offset(), t.view().len());
    let x = Tensor::new(values.slice(4..).view(), DType::F32, 4, 3).expect("a part");
    assert_eq!(view(&x), (16, 48));
    // A part or a tensor of these rows begins at the same byte.
    let row = x.slice_rows(2, 1).expect("a row");
    assert_eq!(view(&row), (40, 12));
    assert_eq!(runtime.to_vec::<f32>(row.view()).expect("values"), [10.0, 11.0, 12.0]);
    let part = BufferPart::from(&row);
    assert_eq!((part.view().offset(), part.view().len()), (40, 12));
    let again = Tensor::new(&part, DType::F32, 3, 1).expect("the same memory");
    assert_eq!(view(&again.slice_rows(1, 2).expect("rows")), (44, 8));
    assert_eq!(view(&x.slice_rows(4, 0).expect("no rows")).1, 0);
    let recast = Tensor::new(&row, DType::Bf16, 2, 3).expect("the same memory");
    assert_eq!(view(&recast), (40, 12));
    for (memory, rows) in [(part, 2), (values.slice(18..).view().into(), 1)] {
        let error = Tensor::new(&memory, DType::F32, rows, 3).expect_err("too large").to_string();
        assert!(error.contains("give fewer rows or more memory"), "{error}");
    }
    let odd = values.part(2..).expect("a part");
    let error = Tensor::new(odd, DType::F32, 1, 3).expect_err("misaligned").to_string();
    assert!(error.contains("begin at a multiple of 4 bytes"), "{error}");
}
