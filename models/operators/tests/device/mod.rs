//! Comparison of a device's kernels with the CPU's, over a runtime: equal operands, compared
//! results.
//!
//! The tests use it on a simulated device, and `examples/check_device.rs` on a real one. The CPU's
//! kernels are the reference (their own tests compare them with f64). Copied, selected or counted
//! results must be bit-identical. Computed results may differ by the rounding of their element type
//! and of sums in f32. Operands lie between canaries, at odd addresses.

mod attention;
pub mod cases;

use half::{bf16, f16};
use leasehold::Runtime;
use leasehold::kernel::Binding;
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::tile::{KernelSpec, NONE, Params, bind};
use leasehold_operators::{BufferPart, Library, Operator};
use std::collections::{BTreeMap, BTreeSet};

/// Words around each operand that no kernel may access.
const CANARIES: usize = 16;
const CANARY: u32 = 0xA5A5_A5A5;

/// The maximum distance of a result from the reference.
#[derive(Debug, Clone, Copy)]
pub enum Bound {
    /// No difference; any NaN matches a NaN.
    Exact,
    /// A difference of up to `abs + rel · |reference|`.
    Within {
        /// For sums.
        abs: f64,
        /// For roundings.
        rel: f64,
    },
    /// The words of log-probabilities: an id is exact, a number may differ by its rounding and that
    /// of a sum.
    Logs,
}

/// The relative error of rounding to a type.
pub fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::Bf16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
    }
}

/// The bound for two results with separate roundings, of values that differ by `abs`.
pub fn within(dtype: DType, abs: f64) -> Bound {
    Bound::Within { abs: abs + 6e-8, rel: 2.0 * rounding(dtype) + 2e-6 }
}

/// An operand: elements of a type, and the bound for their changes.
#[derive(Debug, Clone)]
pub struct Data {
    words: Vec<u32>,
    offset: usize,
    len: usize,
    dtype: DType,
    bound: Bound,
}

impl Data {
    /// Bytes that must be bit-identical afterwards, `skew` bytes after a multiple of 64.
    pub fn bytes(bytes: &[u8], skew: usize) -> Self {
        let offset = 4 * CANARIES + skew;
        let total = (offset + bytes.len()).div_ceil(4) + CANARIES;
        let mut all = vec![CANARY.to_le_bytes()[0]; 4 * total];
        all[offset..offset + bytes.len()].copy_from_slice(bytes);
        let words =
            all.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
        Self { words, offset, len: bytes.len(), dtype: DType::F32, bound: Bound::Exact }
    }

    /// Elements that are only read, `skew` elements after a multiple of 64 bytes.
    pub fn read(dtype: DType, values: &[f32], skew: usize) -> Self {
        let mut bytes = Vec::with_capacity(4 * values.len());
        for &v in values {
            match dtype {
                DType::F32 => bytes.extend(v.to_le_bytes()),
                DType::Bf16 => bytes.extend(bf16::from_f32(v).to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(v).to_le_bytes()),
            }
        }
        Self { dtype, ..Self::bytes(&bytes, skew * dtype.bytes()) }
    }

    /// Elements that are written.
    pub fn written(dtype: DType, values: &[f32], skew: usize, bound: Bound) -> Self {
        Self { bound, ..Self::read(dtype, values, skew) }
    }

    /// Words of 32 bits.
    pub fn words(words: &[i32]) -> Self {
        Self::bytes(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>(), 0)
    }

    /// Zeroed scratch memory of so many bytes: any of them may be written.
    pub fn scratch(bytes: u64) -> Self {
        let any = Bound::Within { abs: f64::INFINITY, rel: 0.0 };
        Self::written(DType::F32, &vec![0.0; bytes as usize / 4], 0, any)
    }

    fn all_bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// The element at byte `at`.
    fn value(&self, bytes: &[u8], at: usize) -> f64 {
        match self.dtype {
            DType::F32 => {
                f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]).into()
            }
            DType::Bf16 => bf16::from_le_bytes([bytes[at], bytes[at + 1]]).into(),
            DType::F16 => f16::from_le_bytes([bytes[at], bytes[at + 1]]).into(),
        }
    }

    /// The largest used part of the bound of an element, or a description of the error.
    fn compare(&self, found: &[u32], wanted: &[u32]) -> Result<f64, String> {
        let (before, found, wanted) =
            (Self::all_bytes(&self.words), Self::all_bytes(found), Self::all_bytes(wanted));
        let range = self.offset..self.offset + self.len;
        if let Some(at) = (0..before.len()).find(|i| !range.contains(i) && found[*i] != before[*i])
        {
            return Err(format!(
                "byte {} of the memory around it was written",
                at as i64 - self.offset as i64
            ));
        }
        let step = self.dtype.bytes();
        let mut worst = 0.0_f64;
        for at in range.clone().step_by(step) {
            if at + step > range.end || found[at..at + step] == wanted[at..at + step] {
                if found[at..range.end.min(at + step)] != wanted[at..range.end.min(at + step)] {
                    return Err(format!("the last bytes differ: {:?}", &found[at..range.end]));
                }
                continue;
            }
            let (f, w) = (self.value(&found, at), self.value(&wanted, at));
            if f.is_nan() && w.is_nan() {
                continue;
            }
            let part = match self.bound {
                Bound::Exact => f64::INFINITY,
                Bound::Within { abs, rel } => (f - w).abs() / (abs + rel * w.abs()),
                // As a float, an id is less than the smallest normal one.
                Bound::Logs
                    if f.abs().min(w.abs()) < f32::MIN_POSITIVE.into() && f != 0.0 && w != 0.0 =>
                {
                    f64::INFINITY
                }
                Bound::Logs => (f - w).abs() / (2e-6 * (1.0 + w.abs())),
            };
            // A NaN exceeds every bound.
            if part.is_nan() || part > 1.0 {
                return Err(format!(
                    "element {} is {f:e}, not {w:e} ({:?})",
                    (at - range.start) / step,
                    self.bound
                ));
            }
            worst = worst.max(part);
        }
        Ok(worst)
    }
}

/// The result of a kernel's cases.
#[derive(Debug, Default)]
pub struct Tally {
    /// Launches compared.
    pub cases: usize,
    /// The largest used part of a bound.
    pub worst: f64,
    /// Descriptions of the errors.
    pub failures: Vec<String>,
}

/// Bytes of the operands of every case, in order, by kernel.
pub type Catalogue = BTreeMap<&'static str, Vec<usize>>;

/// The selected cases: their positions in the catalogue, by kernel.
pub type Choice = BTreeMap<&'static str, BTreeSet<usize>>;

/// Cases of a kernel in a quick choice.
const QUICK_CASES: usize = 5;
/// The maximum bytes of the operands of a case in a quick choice.
const QUICK_BYTES: usize = 64 << 10;

/// The cases of kernels whose names contain one of `parts` (all for none). A `quick` choice has a
/// few small cases of each kernel, spread over sizes and types, for checkers that are a hundred
/// times slower.
pub fn choose(catalogue: &Catalogue, parts: &[String], quick: bool) -> Choice {
    let named = |name: &str| parts.is_empty() || parts.iter().any(|p| name.contains(p.as_str()));
    let cases = |all: &[usize]| {
        let small: Vec<usize> =
            (0..all.len()).filter(|&i| !quick || all[i] <= QUICK_BYTES).collect();
        if !quick || small.len() <= QUICK_CASES {
            return small.into_iter().collect();
        }
        // One case of each stretch, at different positions: types change faster than sizes.
        let stretch = small.len() / QUICK_CASES;
        (0..QUICK_CASES).map(|i| small[i * small.len() / QUICK_CASES + i % stretch]).collect()
    };
    catalogue
        .iter()
        .filter(|(name, _)| named(name))
        .map(|(&name, all)| (name, cases(all)))
        .collect()
}

/// Compares kernels on a device, or lists the comparisons.
pub struct Bench<'a> {
    /// `None` to list only.
    device: Option<(&'a Runtime, Library)>,
    /// `None` for all.
    choice: Option<Choice>,
    /// The cases so far, selected or not.
    pub catalogue: Catalogue,
    /// By kernel.
    pub tallies: BTreeMap<&'static str, Tally>,
}

impl<'a> Bench<'a> {
    /// On the device of a runtime.
    pub fn new(runtime: &'a Runtime) -> leasehold::Result<Self> {
        Ok(Self {
            device: Some((runtime, Library::with_level(runtime, None)?)),
            ..Bench::listing()
        })
    }

    /// Without a device: nothing is launched.
    pub fn listing() -> Self {
        Self { device: None, choice: None, catalogue: BTreeMap::new(), tallies: BTreeMap::new() }
    }

    /// A bench for some cases only.
    pub fn only(self, choice: Choice) -> Self {
        Self { choice: Some(choice), ..self }
    }

    /// One launch on the CPU, two on the device; `None` for an omitted operand.
    pub fn case<P: Params>(
        &mut self,
        name: &'static str,
        what: &str,
        params: &P,
        operands: &[Option<Data>],
    ) {
        let seen = self.catalogue.entry(name).or_default();
        let chosen = self
            .choice
            .as_ref()
            .is_none_or(|c| c.get(name).is_some_and(|places| places.contains(&seen.len())));
        seen.push(operands.iter().flatten().map(|d| d.len).sum());
        let Some((runtime, library)) = self.device.as_ref().filter(|_| chosen) else { return };
        let outcome = compare(runtime, library, name, params, operands);
        let tally = self.tallies.entry(name).or_default();
        tally.cases += 1;
        match outcome {
            Ok(part) => tally.worst = tally.worst.max(part),
            Err(why) => tally.failures.push(format!("{what}: {why}")),
        }
    }
}

/// The largest used part of a bound, or a description of the error.
fn compare<P: Params>(
    runtime: &Runtime,
    library: &Library,
    name: &str,
    params: &P,
    operands: &[Option<Data>],
) -> Result<f64, String> {
    let wanted = reference(name, params, operands)?;
    let found = launch(runtime, library, name, params, operands).map_err(|e| e.to_string())?;
    let again = launch(runtime, library, name, params, operands).map_err(|e| e.to_string())?;
    if found != again {
        return Err("two launches give different bits".to_owned());
    }
    let mut worst = 0.0_f64;
    let signature = KernelSpec::find(name).map_or(&[][..], |s| s.operands);
    for (i, data) in operands.iter().enumerate() {
        if let Some(data) = data {
            let part = data
                .compare(&found[i], &wanted[i])
                .map_err(|why| format!("{}: {why}", signature[i].name))?;
            worst = worst.max(part);
        }
    }
    Ok(worst)
}

/// The operands' memory after a launch on the device.
fn launch<P: Params>(
    runtime: &Runtime,
    library: &Library,
    name: &str,
    params: &P,
    operands: &[Option<Data>],
) -> leasehold::Result<Vec<Vec<u32>>> {
    let mut parts = Vec::new();
    let mut buffers = Vec::new();
    for data in operands {
        let Some(data) = data else {
            parts.push(None);
            buffers.push(None);
            continue;
        };
        let buffer = runtime.upload(&data.words)?;
        parts.push(Some(BufferPart::from(&buffer).slice(data.offset as u64, data.len as u64)?));
        buffers.push(Some(buffer));
    }
    let operator = Operator::new(library, name, params, &parts)?;
    runtime.add_graph_operator(&operator)?;
    buffers
        .iter()
        .map(|b| b.as_ref().map_or_else(|| Ok(Vec::new()), |b| runtime.to_vec(b)))
        .collect()
}

/// The operands' memory after a launch on the CPU.
fn reference<P: Params>(
    name: &str,
    params: &P,
    operands: &[Option<Data>],
) -> Result<Vec<Vec<u32>>, String> {
    let spec = KernelSpec::find(name).ok_or("no kernel of that name")?;
    let mut memory: Vec<Vec<u32>> =
        operands.iter().map(|d| d.as_ref().map_or_else(Vec::new, |d| d.words.clone())).collect();
    let bindings: Vec<Binding> = operands
        .iter()
        .zip(&mut memory)
        .map(|(data, words)| match data {
            None => NONE,
            Some(data) => {
                let whole = bind(words);
                Binding { addr: whole.addr + data.offset as u64, len: data.len as u64, ..whole }
            }
        })
        .collect();
    // SAFETY: the bindings are parts of memory that only this function uses. The launch is checked
    // against them.
    unsafe { spec.run(None, params.as_bytes(), &bindings) }.map_err(|why| why.to_string())?;
    Ok(memory)
}
