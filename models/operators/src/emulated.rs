//! The sources of the CUDA and Metal kernels on the host, for tests: compiled by g++ and clang, and
//! registered as the kernels of simulated CUDA and simulated Metal.
//!
//! This module must not know the machine, only its registry.

use crate::kernels::cpu::tile::{KernelSpec, Refusal};
use crate::kernels::cuda::{self, CudaSpec};
use crate::kernels::mps::{self, MpsSpec};
use crate::simulated::{simulate_mps_with, simulate_with};
use leasehold::backend::sync::{Arc, OnceLock};
use leasehold::kernel::{Binding, Grid, TensorMap};
use leasehold::{Error, Result};
use leasehold_emulator::{Cuda, Emulator, Failure, Launch, Operand, Program, Source};
use leasehold_sim::KernelRegistry;
use leasehold_sim::machine::tensor_map;

/// Bytes of a tensor map.
const MAP: usize = TensorMap::BYTES as usize;

/// The result of a compilation, made once in a process.
type Made = OnceLock<std::result::Result<Option<Program>, String>>;

fn made(
    cell: &Made,
    compile: impl FnOnce() -> std::result::Result<Program, Failure>,
) -> Result<Option<Arc<Emulator>>> {
    let made = cell.get_or_init(|| match compile() {
        Ok(program) => Ok(Some(program)),
        Err(why) if why.is_skip() => {
            eprintln!("skipped: {why}");
            Ok(None)
        }
        Err(why) => Err(why.to_string()),
    });
    let program = made.as_ref().map_err(|log| Error::Compile { log: log.as_str().into() })?;
    Ok(program.clone().map(|program| Arc::new(Emulator::new(program))))
}

/// Runs a launch of `entry` after the checks of the CPU kernel `spec`, with blocks and threads in
/// reverse order on request. `maps` are the driver's tensor maps, in front of the parameters, and
/// `early` is the word of a kernel that can read early. Returns whether the launch has a geometry.
///
/// # Safety
/// - The bindings are live memory, which no other code accesses meanwhile.
/// - `entry` has the signature of `spec`.
unsafe fn run(
    emulator: &Emulator,
    (entry, spec): (&str, &KernelSpec),
    geometry: std::result::Result<Grid, Refusal>,
    (params, bindings, maps): (&[u8], &[Binding], &[u8]),
    (reverse, early): (bool, Option<u32>),
) -> Result<bool> {
    let launch = spec.plan(params).map_err(Error::InvalidArgument)?;
    spec.check(&launch, bindings).map_err(Error::InvalidArgument)?;
    let Ok(Grid { blocks, threads, shared }) = geometry else { return Ok(false) };
    let operand = |b: &Binding| Operand {
        device: b.addr,
        at: b.addr,
        bytes: b.len,
        reads: b.access.reads(),
        writes: b.access.writes(),
    };
    let operands: Vec<Operand> = bindings.iter().map(operand).collect();
    let word = early.map(u32::to_le_bytes);
    // Tensor maps are aligned behind the addresses.
    let addresses = operands.len() * size_of::<u64>();
    let aligned = addresses.next_multiple_of(TensorMap::ALIGNMENT as usize);
    let gap = vec![0; if maps.is_empty() { 0 } else { aligned - addresses }];
    let params = [&gap[..], maps, params, word.as_ref().map_or(&[], |word| &word[..])].concat();
    let launch = Launch {
        kernel: entry,
        operands: &operands,
        params: &params,
        grid: blocks,
        block: threads,
        shared,
        cluster: [1; 3],
        cooperative: false,
        reverse,
    };
    // SAFETY: the caller vouches for the bindings, whose sizes and alignment were checked against
    // the requirements of the launch, and for the signature.
    unsafe { emulator.run(&launch) }.map_err(Error::invalid)?;
    Ok(true)
}

/// The CUDA kernels, compiled for the host. A launch fails for an access outside of its operands,
/// and for a race between its threads.
#[derive(Debug, Clone)]
pub struct EmulatedCuda(Arc<Emulator>);

impl EmulatedCuda {
    /// The kernels, for one launch at a time. The first call of a process compiles them, for
    /// seconds. `None` without g++.
    ///
    /// # Errors
    /// `Compile`, with the compiler's messages.
    pub fn new() -> Result<Option<Self>> {
        static MADE: Made = Made::new();
        let compile = || {
            // Each module has a namespace, because they share names.
            let headers = [
                ("tensor.cuh", cuda::TENSOR),
                ("bulk.cuh", cuda::BULK),
                ("decode.cuh", cuda::DECODE),
            ]
            .map(|(name, text)| format!("#line 1 \"{name}\"\n{text}"));
            let mut text = cuda::COMMON.to_owned() + &headers.concat();
            for (i, module) in cuda::MODULES.iter().enumerate() {
                let cuda::Module { name, source, .. } = module;
                let space = format!("namespace file{i} {{\n#line 1 \"{name}\"\n{source}\n}}\n");
                text.push_str(&space);
            }
            let source = Source { name: "common.cuh", text: &text };
            Program::cuda(&Cuda { source, options: &[], watched: true })
        };
        Ok(made(&MADE, compile)?.map(Self))
    }

    /// Runs a launch of an entry, with blocks and threads in reverse order on request. With `early`
    /// the kernel may read early all that it can. Returns whether CUDA has a geometry for the
    /// launch.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown entry, and for parameters or operands that it refuses.
    ///
    /// # Safety
    /// - The bindings are live memory, which no other code accesses meanwhile.
    pub unsafe fn run(
        &self,
        entry: &str,
        params: &[u8],
        bindings: &[Binding],
        reverse: bool,
        early: bool,
    ) -> Result<bool> {
        let of = |cuda: &'static CudaSpec| Some((cuda, KernelSpec::find(cuda.name)?));
        let (cuda, spec) = CudaSpec::all()
            .find(|cuda| cuda.entry == entry)
            .and_then(of)
            .ok_or_else(|| Error::invalid(format!("no CUDA kernel has the entry {entry}")))?;
        if !cuda.takes(params) {
            return Err(Error::invalid(format!("{entry} does not take these parameters")));
        }
        let geometry = cuda.geometry(params);
        let reads = cuda.early_reads(spec);
        let early = (reads != 0).then_some(if early { reads } else { 0 });
        let launched = cuda.launched(params);
        let mut maps = Vec::new();
        for (&operand, at) in std::iter::zip(cuda.mapped(), (0..).step_by(MAP)) {
            let map = TensorMap::from_params(&launched, at as u32);
            maps.extend(tensor_map::encode(bindings[operand as usize].addr, &map));
        }
        // SAFETY: the caller vouches for the bindings. A CUDA kernel has the operands and the
        // parameters of the CPU kernel with its name.
        unsafe {
            run(&self.0, (entry, spec), geometry, (params, bindings, &maps), (reverse, early))
        }
    }
}

/// The Metal kernels, compiled for the host.
#[derive(Debug, Clone)]
pub struct EmulatedMps(Arc<Emulator>);

impl EmulatedMps {
    /// The kernels, for one launch at a time. The first call of a process compiles them, for
    /// seconds. `None` without clang.
    ///
    /// # Errors
    /// `Compile`, with the compiler's messages.
    pub fn new() -> Result<Option<Self>> {
        static MADE: Made = Made::new();
        let compile = || {
            let sources: Vec<Source<'_>> =
                mps::MODULES.iter().map(|m| Source { name: m.name, text: m.source }).collect();
            Program::metal(&sources)
        };
        Ok(made(&MADE, compile)?.map(Self))
    }

    /// Runs a launch of kernel `name`, with blocks and threads in reverse order on request. Returns
    /// whether Metal has a geometry for the launch.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown kernel, and for parameters or operands that it refuses.
    ///
    /// # Safety
    /// - The bindings are live memory, which no other code accesses meanwhile.
    pub unsafe fn run(
        &self,
        name: &str,
        params: &[u8],
        bindings: &[Binding],
        reverse: bool,
    ) -> Result<bool> {
        let (spec, mps) = KernelSpec::find(name)
            .zip(MpsSpec::find(name))
            .ok_or_else(|| Error::invalid(format!("no Metal kernel is named {name}")))?;
        let geometry = mps.geometry(params);
        // SAFETY: the caller vouches for the bindings. A Metal kernel has the operands and the
        // parameters of the CPU kernel with its name.
        unsafe { run(&self.0, (name, spec), geometry, (params, bindings, &[]), (reverse, None)) }
    }
}

/// Registers the sources of the CUDA kernels for simulated CUDA, under the names of
/// [`simulate`](crate::simulate). Returns whether g++ is there to compile them.
///
/// # Errors
/// `Compile`, with the compiler's messages.
pub fn emulate_cuda(registry: &KernelRegistry) -> Result<bool> {
    let Some(kernels) = EmulatedCuda::new()? else { return Ok(false) };
    simulate_with(registry, move |entry, _, (params, bindings)| {
        // SAFETY: the machine has checked that the bindings lie in live memory, and has translated
        // them for the duration of the call. No other code runs meanwhile.
        let ran = unsafe { kernels.run(entry, params, bindings, false, true) };
        ran.map(drop)
    })?;
    Ok(true)
}

/// Registers the sources of the Metal kernels for simulated Metal, under the names of
/// [`simulate_mps`](crate::simulate_mps). Returns whether clang is there to compile them.
///
/// # Errors
/// `Compile`, with the compiler's messages.
pub fn emulate_mps(registry: &KernelRegistry) -> Result<bool> {
    let Some(kernels) = EmulatedMps::new()? else { return Ok(false) };
    simulate_mps_with(registry, move |entry, _, (params, bindings)| {
        // SAFETY: the machine has checked that the bindings lie in live memory, and has translated
        // them for the duration of the call. No other code runs meanwhile.
        let ran = unsafe { kernels.run(entry, params, bindings, false) };
        ran.map(drop)
    })?;
    Ok(true)
}
