//! The tests' common part: tensors of any element type, launches at every level, and comparison.

mod attention;
mod cache;
mod check;
mod elementwise;
mod emulated;
mod launch;
mod linear;
mod norm;
mod rope;
mod sampling;

use half::{bf16, f16};
use leasehold::kernel::{Binding, CpuArgs};
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::isa::Isa;
use leasehold_operators::kernels::cpu::tile::{KernelSpec, Params, bind};
use proptest::prelude::*;
use std::fmt;

/// Elements of one type, with 16 bytes of padding on both sides that no kernel may access.
#[derive(Clone, PartialEq)]
pub struct Tensor {
    dtype: DType,
    bytes: Vec<u8>,
}

const PAD: usize = 16;
const CANARY: u8 = 0xA5;

impl Tensor {
    pub fn new(dtype: DType, values: &[f32]) -> Self {
        let mut bytes = vec![CANARY; PAD];
        for &v in values {
            match dtype {
                DType::F32 => bytes.extend(v.to_le_bytes()),
                DType::Bf16 => bytes.extend(bf16::from_f32(v).to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(v).to_le_bytes()),
            }
        }
        bytes.extend([CANARY; PAD]);
        Self { dtype, bytes }
    }

    /// Numbers that no result equals by chance.
    pub fn junk(dtype: DType, n: usize) -> Self {
        Self::new(dtype, &vec![-777.0; n])
    }

    pub fn bind(&mut self) -> Binding {
        let end = self.bytes.len() - PAD;
        bind(&mut self.bytes[PAD..end])
    }

    /// The elements, exactly.
    pub fn values(&self) -> Vec<f64> {
        let pads = [&self.bytes[..PAD], &self.bytes[self.bytes.len() - PAD..]];
        assert!(
            pads.iter().all(|pad| pad.iter().all(|&b| b == CANARY)),
            "a kernel wrote outside its operand"
        );
        let body = &self.bytes[PAD..self.bytes.len() - PAD];
        match self.dtype {
            DType::F32 => body
                .chunks(4)
                .map(|c| f64::from(f32::from_le_bytes(c.try_into().unwrap())))
                .collect(),
            DType::Bf16 => body
                .chunks(2)
                .map(|c| f64::from(bf16::from_le_bytes(c.try_into().unwrap())))
                .collect(),
            DType::F16 => body
                .chunks(2)
                .map(|c| f64::from(f16::from_le_bytes(c.try_into().unwrap())))
                .collect(),
        }
    }

    pub fn bits(&self) -> &[u8] {
        &self.bytes
    }
}

/// The relative error of rounding to a type.
pub fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::Bf16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
    }
}

/// Uniform numbers in −1…1.
pub fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// The executor of a kernel: a level of the CPU, or the source of a device's kernel, emulated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Level {
    Cpu(Isa),
    /// The kernels of CUDA devices with this architecture name.
    Cuda(&'static str),
    Metal,
}

impl Level {
    pub const GENERIC: Self = Self::Cpu(Isa::Generic);

    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu(isa) => isa.name(),
            Self::Cuda(arch) => arch,
            Self::Metal => "metal, emulated",
        }
    }

    /// Launches the source of a device's kernel. Returns whether the launch has a geometry, or
    /// `None` for a level of the CPU.
    pub fn emulate(
        self,
        name: &str,
        params: &[u8],
        bindings: &[Binding],
        reverse: bool,
    ) -> Option<bool> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(arch) => Some(emulated::run_cuda(name, params, bindings, reverse, arch)),
            Self::Metal => Some(emulated::run_metal(name, params, bindings, reverse)),
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The levels to test.
pub fn levels() -> Vec<Level> {
    let cpu = Isa::ALL.into_iter().filter(|isa| isa.available()).map(Level::Cpu);
    let cuda = emulated::cuda().map(|_| Level::Cuda("cuda/sm_90"));
    cpu.chain(cuda).chain(emulated::metal().map(|_| Level::Metal)).collect()
}

/// Returns whether the emulator runs a launch's blocks and warps from the last to the first, which
/// is so for half of all parameters.
fn backwards(params: &impl Params) -> bool {
    params.as_bytes().iter().fold(0, |odd, &b| odd ^ b.count_ones()) % 2 == 1
}

fn emulate(level: Level, name: &str, params: &impl Params, bindings: &[Binding], reverse: bool) {
    let launched = level.emulate(name, params.as_bytes(), bindings, reverse);
    assert_eq!(launched, Some(true), "parameters beyond a launch of {level}");
}

/// Launches a kernel at a level, its tiles in order.
pub fn run(level: Level, name: &str, params: &impl Params, bindings: &[Binding]) {
    let Level::Cpu(isa) = level else {
        return emulate(level, name, params, bindings, backwards(params));
    };
    let spec = KernelSpec::find(name).unwrap();
    // SAFETY: the bindings belong to tensors of the caller, which no other code uses.
    unsafe { spec.run(Some(isa), params.as_bytes(), bindings) }.unwrap();
}

/// Launches a kernel with its tiles in reverse order on two threads; the emulator in its other
/// order.
pub fn run_scattered(
    level: Level,
    name: &str,
    params: &(impl Params + Sync),
    bindings: &[Binding],
) {
    let Level::Cpu(isa) = level else {
        return emulate(level, name, params, bindings, !backwards(params));
    };
    let spec = KernelSpec::find(name).unwrap();
    let launch = spec.plan(params.as_bytes()).unwrap();
    spec.check(&launch, bindings).unwrap();
    let (_, tile) = spec.resolve(Some(isa)).unwrap();
    let [nx, ny, nz] = launch.grid;
    let one = |i: u32| {
        // SAFETY: the bindings belong to tensors of the caller; the launch has no scratch memory.
        let mut args = unsafe {
            CpuArgs::new(
                (launch.grid, [1; 3]),
                bindings,
                params.as_bytes(),
                (std::ptr::null_mut(), 0),
            )
        };
        args.set_tile([i % nx, i / nx % ny, i / nx / ny]);
        // SAFETY: parameters and bindings were checked above, and tiles access only their own
        // elements.
        unsafe { tile(&args) }
    };
    let total = nx * ny * nz;
    std::thread::scope(|scope| {
        scope.spawn(|| (0..total).rev().filter(|i| i % 2 == 0).for_each(one));
        (0..total).rev().filter(|i| i % 2 == 1).for_each(one);
    });
}

/// Asserts that each element is within its bound.
#[track_caller]
pub fn close(what: &str, found: &[f64], wanted: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(found.len(), wanted.len());
    for (i, (f, w)) in found.iter().zip(wanted).enumerate() {
        let bound = bound(i);
        assert!(
            (f - w).abs() <= bound || (f.is_nan() && w.is_nan()),
            "{what}[{i}]: {f}, not {w} (within {bound:e})"
        );
    }
}

pub fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16)]
}

/// Sizes on both sides of every vector and block boundary.
pub fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        3 => prop_oneof![Just(1usize), Just(3), Just(7), Just(8), Just(15), Just(16), Just(17), Just(31), Just(32), Just(33), Just(97)],
        1 => 1usize..200,
    ]
}

pub fn cases(cases: u32) -> ProptestConfig {
    // Emulated kernels take most of the time. `ci/long.sh` tries all cases.
    let cases = if long() { cases } else { cases / 4 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Whether the long form was asked for.
pub fn long() -> bool {
    std::env::var_os("LEASEHOLD_LONG").is_some()
}
