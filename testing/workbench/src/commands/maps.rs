//! `leasehold-workbench maps`: random tensor maps beside CUDA's driver. The driver and Leasehold's
//! rules accept the same ones, and their boxes are those of a model.
//!
//! This module must not know a driver's form of a map.

use crate::devices::SEED;
use crate::simulated;
use leasehold::bytemuck::{self, Pod, Zeroable};
use leasehold::kernel::{
    Grid, Interleave, KernelCheck, KernelDesc, KernelSource, LaunchInfo, MapElement, Swizzle,
    TensorMap,
};
use leasehold::{Access, Array, Context, DeviceId, Error, KernelBase, Runtime, View};
use leasehold_cli::commands::print_json;
use leasehold_cli::failure::Failure;
use leasehold_cuda::CudaConfig;
use leasehold_cuda::driver::ops::{DeviceOps, ModuleOps};
use leasehold_cuda::driver::real::RealDriver;
use leasehold_hal::Binding;
use leasehold_sim::{Dice, KernelRegistry};
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The device to try
    #[arg(long, value_name = "ID", default_value = "cuda:0")]
    device: DeviceId,
    /// Tries the simulated driver instead of the vendor's
    #[arg(long)]
    sim: bool,
    /// The first seed: the same seed gives the same map
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Maps, of this and the following seeds
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    maps: u64,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// Numbers of maps, by their fate.
#[derive(Debug, Default, Serialize)]
struct Report {
    maps: u64,
    /// Maps that the driver accepts.
    accepted: u64,
    /// Of these, maps that Leasehold refuses, as no device copies their boxes: too many bytes, or a
    /// tensor of too many elements.
    too_large: u64,
    /// Of these, maps that a launch refuses, as the tensor is longer than the memory.
    too_long: u64,
    /// Boxes that a kernel has copied.
    copied: u64,
    /// Of these, boxes of interleaved tensors.
    interleaved: u64,
}

/// Copies a box to shared memory, and all of that to `out`. The last word says that the box came.
const SOURCE: &str = r#"
typedef unsigned int u32;
struct __align__(64) Map { unsigned long long words[16]; };
struct Where { int c[5]; u32 rank, bytes, total; };
extern __shared__ __align__(1024) u32 memory[];
#define LOAD(N, PLACE) \
    asm volatile("cp.async.bulk.tensor." #N "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" PLACE "}], [%2];" \
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(w.c[0]), "r"(w.c[1]), "r"(w.c[2]), "r"(w.c[3]), "r"(w.c[4]) : "memory")
extern "C" __global__ void random_box(const u32*, u32* out, const __grid_constant__ Map map, Where w) {
    __shared__ unsigned long long filled;
    const u32 to = (u32)__cvta_generic_to_shared(memory), barrier = (u32)__cvta_generic_to_shared(&filled);
    for (u32 i = threadIdx.x; i < w.total / 4; i += blockDim.x) memory[i] = 0xeeeeeeee;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(w.bytes) : "memory");
        switch (w.rank) {
            case 1: LOAD(1, "%3"); break;
            case 2: LOAD(2, "%3, %4"); break;
            case 3: LOAD(3, "%3, %4, %5"); break;
            case 4: LOAD(4, "%3, %4, %5, %6"); break;
            default: LOAD(5, "%3, %4, %5, %6, %7");
        }
    }
    // A box of other bytes than the model's never ends the phase.
    u32 over = 0;
    for (u32 i = 0; !over && i < 1000000; ++i)
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }" : "=r"(over) : "r"(barrier) : "memory");
    if (!over) return;
    for (u32 i = threadIdx.x; i < w.total / 4; i += blockDim.x) out[i] = memory[i];
    if (threadIdx.x == 0) out[w.total / 4] = over;
}
"#;

/// The kernel's parameters.
#[derive(Clone, Copy, Pod, Zeroable)]
#[bytemuck(crate = "leasehold::bytemuck")]
#[repr(C)]
struct Place {
    map: TensorMap,
    at: [i32; 5],
    rank: u32,
    bytes: u32,
    total: u32,
}

/// Bytes of the tensors' memory, and of a block's shared memory. A block keeps 1 KiB for the flag.
const MEMORY: u64 = 16 << 20;
const SHARED: u64 = 226 << 10;

fn kernel() -> leasehold::Result<KernelBase> {
    let check = KernelCheck::new(|launch| {
        let Place { map, rank, total, .. } = launch.params()?;
        let fits = u64::from(total) <= SHARED && launch.shared >= total && total.is_multiple_of(4);
        if launch.grid != [1; 3]
            || rank as usize != map.rank()
            || Shape::new(&map).room() > total.into()
            || !fits
        {
            return Err(Error::invalid("one block, with shared memory for a box"));
        }
        launch.want(1, u64::from(total) + 4)
    });
    let source = KernelSource::CudaC { source: SOURCE.into(), options: Vec::new().into() };
    let desc = KernelDesc::new("random_box", source, &[Access::Read, Access::Write], check);
    // SAFETY: the instruction reads what lies in the map, which the launch has found in binding 0.
    // The check asks for the bytes that the block writes, and its boxes fit.
    unsafe { KernelBase::new(desc.params_of::<Place>().aligned(4).map(0, 0)) }
}

/// The layout of a box in shared memory.
struct Shape {
    map: TensorMap,
    /// Bytes of a unit of dimension 0: an element, or a slice of an interleaved tensor.
    unit: u64,
    counts: [u64; 5],
    steps: [i64; 5],
    /// Bytes from a row to the next.
    pitch: u64,
    swizzle: u8,
}

impl Shape {
    fn new(map: &TensorMap) -> Self {
        let [interleave, swizzle, ..] = map.modes();
        let (rank, slices) = (map.rank(), interleave != 0);
        let unit = if slices { 8 << interleave } else { map.stride(0) };
        // The first step counts slices only, of which a box has one in the last dimension but one.
        let steps = std::array::from_fn(|d| {
            if d < rank && (slices || d > 0) { map.step_of(d).into() } else { 1 }
        });
        let counts = std::array::from_fn(|d| {
            let is_one = d >= rank || (slices && d + 2 == rank);
            if is_one { 1 } else { u64::from(map.box_of(d)).div_ceil(steps[d].max(1) as u64) }
        });
        let row = counts[0] * unit;
        let pitch = if slices || swizzle == 0 { row } else { 16 << swizzle };
        Self { map: *map, unit, counts, steps, pitch, swizzle }
    }

    /// Bytes of shared memory, with those in which the last pieces may change places.
    fn room(&self) -> u64 {
        let rows: u64 = self.counts[1..].iter().product();
        (rows * self.pitch).next_multiple_of(128)
    }

    /// Bytes that a copy counts.
    fn bytes(&self) -> u64 {
        self.counts.iter().product::<u64>() * self.unit
    }

    /// Shared memory behind a copy of a box of `tensor`.
    fn model(&self, tensor: &[u8], at: [i32; 5]) -> Vec<u8> {
        let mut shared = vec![0xee; self.room() as usize];
        let outside = if self.map.modes()[3] == 0 { [0, 0] } else { [0xf7, 0x7f] };
        let rounds = self.map.element().is_some_and(|e| e as u8 >= MapElement::Tf32 as u8);
        let row = self.counts[0] * self.unit;
        let rows: u64 = self.counts[1..].iter().product();
        for n in 0..rows {
            let (mut rest, mut inside, mut line) = (n, true, 0);
            for (d, at) in at.iter().enumerate().take(self.map.rank()).skip(1) {
                let k = i64::from(*at) + (rest % self.counts[d]) as i64 * self.steps[d];
                rest /= self.counts[d];
                inside &= k >= 0 && (k as u64) < self.map.size(d);
                line += k * self.map.stride(d) as i64;
            }
            for byte in (0..row).step_by(16) {
                let place = n * self.pitch + byte;
                // Pieces of 16 bytes change places by the number of their line of 128.
                let moved = place ^ ((place >> 7 & ((1 << self.swizzle) - 1)) << 4);
                let piece = &mut shared[moved as usize..][..16];
                for (i, to) in piece.iter_mut().enumerate() {
                    let (element, part) =
                        ((byte + i as u64) / self.unit, (byte + i as u64) % self.unit);
                    let k = i64::from(at[0]) + element as i64 * self.steps[0];
                    let is_there = inside && k >= 0 && (k as u64) < self.map.size(0);
                    let from = line + k * self.unit as i64 + part as i64;
                    *to = if is_there { tensor[from as usize] } else { outside[i % 2] };
                }
                let is_there = |i: u64| {
                    let k = i64::from(at[0]) + ((byte + i) / self.unit) as i64 * self.steps[0];
                    inside && k >= 0 && (k as u64) < self.map.size(0)
                };
                for (i, word) in piece.chunks_exact_mut(4).enumerate() {
                    if rounds && is_there(4 * i as u64) {
                        let bits = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                        word.copy_from_slice(&tf32(bits).to_le_bytes());
                    }
                }
            }
        }
        shared
    }
}

/// The bits of an `f32` after a load in the kinds of `tf32`.
fn tf32(bits: u32) -> u32 {
    if f32::from_bits(bits).is_nan() {
        return 0x7fff_e000;
    }
    bits.wrapping_add(0xfff + (bits >> 13 & 1)) & !0x1fff
}

/// A random map, and bytes from a multiple of 512 to its tensor.
fn random(dice: &mut Dice) -> (TensorMap, u64) {
    use MapElement::{Bf16, F16, F32, F32Ftz, F64, I32, I64, Tf32, Tf32Ftz, U8, U16, U32, U64};
    let one_in = |dice: &mut Dice, n: u64| dice.below(n) == 0;
    let elements = [U8, U16, U32, I32, U64, I64, F16, F32, F64, Bf16, F32Ftz, Tf32, Tf32Ftz];
    let element = elements[dice.below(13) as usize];
    let rank = 1 + dice.below(5) as usize;
    let interleave = [Interleave::None, Interleave::B16, Interleave::B32]
        [if one_in(dice, 3) { dice.below(3) as usize } else { 0 }];
    let swizzle =
        [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128][dice.below(4) as usize];
    let bytes = u64::from(element.bytes());
    let align = if interleave == Interleave::B32 { 32 } else { 16 };
    let unit = match interleave {
        Interleave::None => bytes,
        _ => align,
    };
    let (mut sizes, mut boxes, mut steps, mut strides) = (vec![], vec![], vec![], vec![]);
    let mut end = 0;
    for d in 0..rank {
        let odd = [0, (1 << 32) + 1, 1 << 32, 1 + dice.below(1 << 33)];
        let most = if d == 0 { 400 } else { 16 };
        sizes.push(if one_in(dice, 60) {
            odd[dice.below(4) as usize]
        } else {
            1 + dice.below(most)
        });
        let most = if one_in(dice, 4) { 16 } else { 2 << swizzle as u8 };
        let inner = 16 * (1 + dice.below(most));
        boxes.push(match dice.below(40) {
            0 => [0, 257, 255, 256][dice.below(4) as usize],
            1 => 1 + dice.below(256) as u32,
            _ if d == 0 => (inner / bytes) as u32,
            2 => 128,
            _ => 1 + dice.below(6) as u32,
        });
        steps.push(match dice.below(60) {
            0 => [0, 9, 8, 8][dice.below(4) as usize],
            1..10 => 1 + dice.below(8) as u32,
            _ => 1,
        });
        let odd = [0, 1 << 40, (1 << 40) - align, end + 8, end + 16];
        if d > 0 {
            strides.push(match dice.below(40) {
                0 => odd[dice.below(5) as usize],
                _ => end + align * dice.below(3),
            });
        }
        let stride = strides.last().copied().unwrap_or(unit);
        end = sizes[d].saturating_mul(stride).checked_next_multiple_of(align).unwrap_or(1 << 41);
        end = end.min(1 << 41);
    }
    let mut map = TensorMap::new(element, &sizes, &boxes).strides(&strides).steps(&steps);
    map = map.swizzle(swizzle).interleave(interleave);
    map = map.l2_promotion([0, 64, 128, 256][dice.below(4) as usize]);
    if one_in(dice, 4) {
        map = map.fill_nan();
    }
    (
        map,
        [32 * dice.below(16), 16 * dice.below(32), 4 * dice.below(128)]
            [usize::from(one_in(dice, 8)) + usize::from(one_in(dice, 20))],
    )
}

/// Whether Leasehold's rules accept the map for memory of any length; `None` for a box that fits
/// into no shared memory, and for a tensor that is too large for a device.
fn accepts(map: &TensorMap, addr: u64) -> Option<bool> {
    let binding = Binding { addr, len: u64::MAX, native: 0, access: Access::Read };
    let launch = LaunchInfo::new(([1; 3], [1; 3], 0), &[], std::slice::from_ref(&binding));
    match map.validate_for(&launch, 0) {
        Err(why) if why.to_string().contains("shared memory") => None,
        Err(why) if why.to_string().contains("copies no box") => None,
        checked => Some(checked.is_ok()),
    }
}

struct Bench {
    runtime: Runtime,
    driver: Arc<dyn ModuleOps>,
    kernel: KernelBase,
    memory: Vec<u8>,
    tensor: Array<u8>,
    out: Array<u32>,
}

impl Bench {
    fn new(runtime: Runtime, driver: Arc<dyn ModuleOps>) -> leasehold::Result<Self> {
        let mut dice = Dice::new(1);
        let memory: Vec<u8> =
            (0..MEMORY / 8).flat_map(|_| dice.below(u64::MAX).to_le_bytes()).collect();
        let tensor = runtime.upload(&memory)?;
        let out = runtime.alloc_array((SHARED / 4) as usize + 1)?;
        let kernel = kernel()?;
        kernel.prepare(&runtime)?;
        Ok(Self { runtime, driver, kernel, memory, tensor, out })
    }

    /// Tries the map of a seed. Returns what is wrong.
    fn map(&self, seed: u64, report: &mut Report) -> leasehold::Result<Option<String>> {
        let mut dice = Dice::new(seed);
        let (map, offset) = random(&mut dice);
        let wrong = |what: &str| Ok(Some(format!("seed {seed}: {map:?} at byte {offset}: {what}")));
        let base = self.tensor.buffer().addr();
        let accepted = self.driver.tensor_map(base + offset, &map).is_ok();
        report.maps += 1;
        report.accepted += u64::from(accepted);
        let ours = match accepts(&map, base + offset) {
            Some(ours) if ours != accepted => {
                let who = if ours { "Leasehold" } else { "the driver" };
                return wrong(&format!("{who} alone accepts it"));
            }
            None if accepted => {
                report.too_large += 1;
                false
            }
            ours => ours == Some(true),
        };
        let shape = Shape::new(&map);
        let fits = ours && shape.room() <= SHARED;
        let at = std::array::from_fn(|d| {
            if d >= map.rank() {
                return 0;
            }
            // The innermost coordinate is a multiple of 16 bytes.
            let least = if d == 0 { (16 / shape.unit as i64).max(1) } else { 1 };
            let size = (map.size(d) as i64).min(1 << 20);
            let side = i64::from(map.box_of(d));
            ((dice.below((size + 2 * side) as u64 + 1) as i64 - side) / least * least) as i32
        });
        let total = if fits { shape.room() as u32 } else { 128 };
        let place = Place { map, at, rank: map.rank() as u32, bytes: shape.bytes() as u32, total };
        let grid = Grid::from((1, 64)).shared(total);
        let part = self.tensor.part(offset as usize..)?;
        let stream = self.runtime.stream();
        match stream.launch(&self.kernel, &[part.read(), self.out.write()], &place, grid) {
            Err(Error::InvalidArgument(_)) if !ours => return Ok(None),
            Err(Error::InvalidArgument(_)) if map.bytes() > MEMORY - offset => {
                report.too_long += 1;
                return Ok(None);
            }
            Err(Error::InvalidArgument(_)) if !fits => return Ok(None),
            launched => launched?,
        }
        let words = total as usize / 4;
        let found = self.runtime.to_vec(self.out.slice(..=words))?;
        let wanted = shape.model(&self.memory[offset as usize..], at);
        if found[words] != 1 {
            return wrong(&format!("a box at {at:?} of {} bytes never came", shape.bytes()));
        }
        let found: &[u8] = bytemuck::cast_slice(&found[..words]);
        if let Some(byte) = std::iter::zip(found, &wanted).position(|(a, b)| a != b) {
            return wrong(&format!(
                "byte {byte} of a box at {at:?} is {:#x}, not {:#x}",
                found[byte], wanted[byte]
            ));
        }
        self.runtime.stream().fill(self.out.slice(words..=words).view(), 0_u32)?;
        report.copied += 1;
        report.interleaved += u64::from(map.modes()[0] != 0);
        Ok(None)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let device = arguments.device;
    let open = || -> leasehold::Result<Bench> {
        if arguments.sim {
            let machine = simulated::machine(SEED, KernelRegistry::new());
            let (backend, driver) = simulated::cuda(machine, CudaConfig::default())?;
            let context = Context::with_backends(vec![Arc::new(backend)]);
            return Bench::new(context.runtime(device)?, driver);
        }
        let driver = RealDriver::new();
        driver.init()?;
        Bench::new(Context::new().runtime(device)?, Arc::new(driver))
    };
    let bench = open().map_err(|e| Failure::from(e).at(device))?;
    let mut report = Report::default();
    let seeds = arguments.seed..arguments.seed.saturating_add(arguments.maps);
    let mut wrong = Vec::new();
    for seed in seeds {
        let tried = bench.map(seed, &mut report);
        wrong.extend(tried.map_err(|e| Failure::new(format!("{device}: seed {seed}: {e}")))?);
        if wrong.len() == 20 {
            break;
        }
    }
    if !wrong.is_empty() {
        return Err(Failure::new(wrong.join("; ")).at(device));
    }
    if arguments.json {
        return print_json(&report);
    }
    let Report { maps, accepted, too_large, too_long, copied, interleaved } = report;
    writeln!(
        std::io::stdout(),
        "{device}: {maps} maps: the driver accepts {accepted}, and Leasehold the same but {too_large} whose boxes no device copies; {too_long} are longer than the memory; {copied} boxes are the model's, {interleaved} of them interleaved"
    )?;
    Ok(())
}
