//! CUDA and Metal kernels without a device: their sources, compiled for the host.

use leasehold::kernel::Binding;
use leasehold_operators::kernels::cuda::{CudaSpec, TENSOR_KERNELS};
use leasehold_operators::{EmulatedCuda, EmulatedMps};

thread_local! {
    static CUDA: Option<EmulatedCuda> = EmulatedCuda::new().unwrap_or_else(|why| panic!("{why}"));
    static METAL: Option<EmulatedMps> = EmulatedMps::new().unwrap_or_else(|why| panic!("{why}"));
}

/// The CUDA kernels of this thread.
pub fn cuda() -> Option<EmulatedCuda> {
    CUDA.with(Clone::clone)
}

/// The Metal kernels of this thread.
pub fn metal() -> Option<EmulatedMps> {
    METAL.with(Clone::clone)
}

/// Launches a kernel as the CUDA backend does: the operands' addresses, then the parameters, in one
/// buffer. With `reverse`, blocks and threads run from the last to the first, and the kernel reads
/// early what it can. Returns whether the launch has a geometry. A kernel for tensor cores of
/// `arch` goes before the kernel for all devices.
pub fn run_cuda(
    name: &str,
    params: &[u8],
    bindings: &[Binding],
    reverse: bool,
    arch: &str,
) -> bool {
    let is_aligned = |&i: &u32| bindings[i as usize].addr.is_multiple_of(16);
    let takes = |cuda: &&CudaSpec| {
        cuda.name == name
            && cuda.archs.contains(&arch)
            && cuda.takes(params)
            && cuda.mapped().iter().all(is_aligned)
    };
    let tensor = TENSOR_KERNELS.iter().find(takes);
    let entry = tensor.or_else(|| CudaSpec::find(name)).expect("a CUDA kernel").entry;
    let cuda = cuda().expect("an emulation");
    // SAFETY: the bindings belong to tensors of the caller, which no other code uses.
    unsafe { cuda.run(entry, params, bindings, reverse, reverse) }.expect("a launch")
}

/// Launches a Metal kernel, as [`run_cuda`].
pub fn run_metal(name: &str, params: &[u8], bindings: &[Binding], reverse: bool) -> bool {
    let metal = metal().expect("an emulation");
    // SAFETY: the bindings belong to tensors of the caller, which no other code uses.
    unsafe { metal.run(name, params, bindings, reverse) }.expect("a launch")
}
