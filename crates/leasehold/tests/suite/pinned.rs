//! What a manager lends belongs to its device and its native object: a unique lease gives no `&mut`, with which two would be swapped.
//!
//! The compiler checks it: the item that a type is asked for here is ambiguous if the type is `Unpin`.

use leasehold_cpu::manager as cpu;
use leasehold_cuda::manager as cuda;
use leasehold_sim::manager as sim;

/// Has one item for any type, and another one for those that are `Unpin`.
trait Pinned<Which> {
    const NAME: fn() -> &'static str;
}

impl<T: ?Sized> Pinned<()> for T {
    const NAME: fn() -> &'static str = std::any::type_name::<T>;
}

impl<T: ?Sized + Unpin> Pinned<u8> for T {
    const NAME: fn() -> &'static str = std::any::type_name::<T>;
}

macro_rules! pinned {
    ($($payload:ty,)*) => { [$(<$payload as Pinned<_>>::NAME()),*] };
}

#[test]
fn what_managers_lend_is_not_swapped() {
    let all = pinned![
        leasehold::Buffer,
        leasehold::Event,
        leasehold::backend::Pipeline,
        leasehold::backend::Timestamp,
        cpu::device::DeviceState,
        cpu::gate::GateState,
        cpu::graph::GraphState,
        cpu::stream::StreamState,
        cuda::context::ContextState,
        cuda::device::DeviceState,
        cuda::event::EventState,
        cuda::gate::GateState,
        cuda::graph::GraphState,
        cuda::module::ModuleState,
        cuda::stream::StreamState,
        sim::device::DeviceState,
        sim::gate::GateState,
        sim::graph::GraphState,
        sim::stream::StreamState,
        // Through these the backends' streams, graphs, gates and devices are lent.
        dyn leasehold::backend::Device,
        dyn leasehold::backend::Gate,
        dyn leasehold::backend::GraphExec,
        dyn leasehold::backend::Stream,
    ];
    let mut names = all.to_vec();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all.len(), "each once: {names:?}");
}
