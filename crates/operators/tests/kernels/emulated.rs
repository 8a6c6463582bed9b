//! CUDA and Metal kernels without a device: their sources, compiled for the host.

use leasehold::backend::sync::OnceLock;
use leasehold_emulator::{Emulator, Source};
use leasehold_hal::kernel::Binding;
use leasehold_operators::EmulatedMps;
use leasehold_operators::kernels::cpu::tile::KernelSpec;
use leasehold_operators::kernels::cuda::{COMMON, CudaSpec, KERNELS, MODULES, TENSOR_KERNELS};

fn compile_cuda() -> Result<Option<Emulator>, String> {
    let sources: Vec<Source<'_>> =
        MODULES.iter().map(|m| Source { name: m.name, text: m.source }).collect();
    let place = |spec: &CudaSpec| MODULES.iter().position(|m| m.name == spec.module.name);
    let kernels: Vec<(&str, usize)> = KERNELS
        .iter()
        .chain(TENSOR_KERNELS)
        .map(|spec| (spec.entry, place(spec).expect("a module of the list")))
        .collect();
    let common = Source { name: "common.cuh", text: COMMON };
    // SAFETY: the library's sources declare no variable with an initialiser that runs.
    unsafe { Emulator::cuda(common, &sources, &kernels) }
}

/// The CUDA kernels; compiled once in a process.
pub fn cuda() -> Option<&'static Emulator> {
    static CUDA: OnceLock<Result<Option<Emulator>, String>> = OnceLock::new();
    match CUDA.get_or_init(compile_cuda) {
        Ok(emulator) => emulator.as_ref(),
        Err(why) => panic!("{why}"),
    }
}

/// The Metal kernels.
pub fn metal() -> Option<EmulatedMps> {
    EmulatedMps::new().unwrap_or_else(|why| panic!("{why}"))
}

/// Launches a kernel as the CUDA backend does: the operands' addresses, then the parameters, in one
/// buffer. With `reverse`, blocks and threads run from the last to the first. Returns whether the
/// launch has a geometry. A kernel for tensor cores goes before the kernel for all devices.
pub fn run_cuda(name: &str, params: &[u8], bindings: &[Binding], reverse: bool) -> bool {
    let spec = KernelSpec::find(name).expect("a kernel of that name");
    let launch = spec.plan(params).expect("parameters that the kernel takes");
    spec.check(&launch, bindings).expect("operands that the kernel takes");
    let tensor = TENSOR_KERNELS.iter().find(|cuda| cuda.name == name && cuda.takes(params));
    let cuda = tensor.or_else(|| CudaSpec::find(name)).expect("a CUDA kernel");
    let Ok(geometry) = cuda.geometry(params) else {
        return false;
    };
    let operands: Vec<u64> = bindings.iter().map(|b| b.addr).collect();
    let emulator = self::cuda().expect("an emulation");
    // SAFETY: the bindings are checked against the requirements of the launch, as for every other
    // level's tiles.
    unsafe { emulator.run(cuda.entry, &operands, params, geometry.grid, geometry.block, reverse) }
        .expect("a launch");
    true
}

/// Launches a Metal kernel, as [`run_cuda`].
pub fn run_metal(name: &str, params: &[u8], bindings: &[Binding], reverse: bool) -> bool {
    let metal = metal().expect("an emulation");
    // SAFETY: the bindings belong to tensors of the caller, which no other code uses.
    unsafe { metal.run(name, params, bindings, reverse) }.expect("a launch")
}
