//! An object that a manager lends belongs to its device and its native object. A unique lease of it
//! gives no `&mut`, with which two objects would be swapped.
//!
//! The compiler checks it: the item that a type is asked for here is ambiguous if the type is
//! `Unpin`.

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
        leasehold::backend::TimestampQuery,
        cpu::device::DeviceState,
        cpu::host_timeline::HostTimelineState,
        cpu::graph::GraphState,
        cpu::stream::StreamState,
        cuda::context::ContextState,
        cuda::device::DeviceState,
        cuda::event::EventState,
        cuda::host_timeline::HostTimelineState,
        cuda::graph::GraphState,
        cuda::module::ModuleState,
        cuda::stream::StreamState,
        sim::device::DeviceState,
        sim::host_timeline::HostTimelineState,
        sim::graph::GraphState,
        sim::stream::StreamState,
        // Through these the backends' streams, graphs, host timelines and devices are lent.
        dyn leasehold::backend::Device,
        dyn leasehold::backend::HostTimeline,
        dyn leasehold::backend::GraphExec,
        dyn leasehold::backend::Stream,
    ];
    let mut names = all.to_vec();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all.len(), "each once: {names:?}");
}
