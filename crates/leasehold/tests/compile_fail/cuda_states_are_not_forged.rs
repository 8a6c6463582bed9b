//! The managers own the states that they lend: nobody makes one, changes one or swaps two.
#![forbid(unsafe_code)]

use leasehold::UniqueLease;
use leasehold_cuda::driver::ops::NativeEvent;
use leasehold_cuda::manager::device::DeviceState;
use leasehold_cuda::manager::event::EventState;
use leasehold_cuda::manager::graph::GraphState;
use leasehold_cuda::manager::stream::StreamState;

fn forged(event: NativeEvent) -> EventState {
    EventState { native: event }
}

fn inside(device: &DeviceState, stream: &StreamState, graph: &GraphState) {
    let _ = device.shared();
    let _ = device.memory();
    let _ = &stream.core;
    let _ = &graph.program;
}

fn swapped(mut a: UniqueLease<EventState>, mut b: UniqueLease<EventState>) {
    std::mem::swap(&mut *a, &mut *b);
}

fn main() {}
