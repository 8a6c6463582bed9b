//! Behaviour of the machine at its public interface.

mod backend;
mod detector;
mod faults;
mod loops;
mod machine;
mod meet;
mod memory;
mod model;
mod wrappers;

use leasehold_hal::{Access, Binding};
use leasehold_sim::{
    Command, FillCall, KernelBody, KernelCall, KernelRegistry, KernelSpec, Launch, Machine,
    MachineConfig, QueueId, Transfer,
};
use std::task::Poll;

/// `out[i] = a[i] + b[i]`, over bytes.
fn add(launch: &Launch<'_>) -> leasehold_core::Result<()> {
    let ((a, n), (b, _), (out, _)) =
        (launch.pointer::<u8>(0), launch.pointer::<u8>(1), launch.pointer::<u8>(2));
    for i in 0..n {
        // SAFETY: the machine checked the bindings, which are of one length here.
        unsafe { *out.add(i) = (*a.add(i)).wrapping_add(*b.add(i)) };
    }
    Ok(())
}

/// The kernels of these tests.
fn kernels() -> KernelRegistry {
    let all = KernelRegistry::new();
    all.register(
        "add",
        KernelSpec::new(&[Access::Read, Access::Read, Access::Write], 0, KernelBody::run(add)),
    );
    let bump = KernelBody::run(|launch| {
        let by: u8 = launch.params()?;
        let (at, n) = launch.pointer::<u8>(0);
        // SAFETY: the machine checked the binding.
        (0..n).for_each(|i| unsafe { *at.add(i) = (*at.add(i)).wrapping_add(by) });
        Ok(())
    });
    all.register("bump", KernelSpec::new(&[Access::ReadWrite], 1, bump));
    let sum = KernelBody::run(|launch| {
        let ((from, n), (to, _)) = (launch.pointer::<u8>(0), launch.pointer::<u8>(1));
        // SAFETY: the machine checked the bindings.
        unsafe { *to = (0..n).fold(0u8, |s, i| s.wrapping_add(*from.add(i))) };
        Ok(())
    });
    all.register("sum", KernelSpec::new(&[Access::Read, Access::Write], 0, sum));
    all.register(
        "trap",
        KernelSpec::new(&[], 0, KernelBody::run(|_| panic!("the kernel's own trap"))),
    );
    let until = KernelBody::poll(|launch| {
        // SAFETY: the machine checked the binding.
        let set = unsafe { launch.pointer::<u8>(0).0.read_volatile() } != 0;
        Ok(if set { Poll::Ready(()) } else { Poll::Pending })
    });
    all.register("until", KernelSpec::new(&[Access::Read], 0, until));
    all
}

fn config(seed: u64) -> MachineConfig {
    MachineConfig::seed(seed).kernels(kernels()).timeout(std::time::Duration::ZERO)
}

fn machine(seed: u64) -> Machine {
    Machine::new(config(seed)).unwrap()
}

fn bind(addr: u64, len: u64, access: Access) -> Binding {
    Binding { addr, len, native: 0, access }
}

/// A launch of a kernel of these tests, with the accesses that it declares.
fn launch(machine: &Machine, name: &str, ranges: &[(u64, u64)], params: &[u8]) -> KernelCall {
    let kernel = machine.kernels().get(name).unwrap();
    let bindings = ranges
        .iter()
        .zip(&kernel.spec.bindings)
        .map(|(&(at, n), &access)| bind(at, n, access))
        .collect();
    KernelCall::new(kernel, bindings, params.to_vec())
}

fn fill(machine: &Machine, queue: QueueId, at: u64, bytes: u64, value: u8) {
    machine.enqueue(queue, Command::Fill(FillCall::linear(at, bytes, value.into(), 1))).unwrap();
}

/// A copy, possibly from or to host memory, which tests keep until the queue is over or destroyed.
fn copy(machine: &Machine, queue: QueueId, from: u64, to: u64, bytes: u64) {
    // SAFETY: the tests keep the host memory until the queue is over or destroyed.
    let transfer = unsafe { Transfer::linear(from, to, bytes).with_host() };
    machine.enqueue(queue, Command::Copy(transfer)).unwrap();
}

/// The present contents at an address.
fn peek(machine: &Machine, at: u64, bytes: usize) -> Vec<u8> {
    let mut to = vec![0; bytes];
    machine.peek(at, &mut to).unwrap();
    to
}
