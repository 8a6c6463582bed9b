//! Times of loops over the driver alone: the lower bound for all code above the driver, through the
//! same bindings. A benchmark calls these functions beside its own in the same process.
//!
//! Each figure is taken several times; a sample is a batch of calls. *Host* is the time of the
//! calls alone, per call. *Total* is the time until the device has finished the batch, per call.
//! Nothing else runs on the stream meanwhile.
//!
//! The host's time leaves the first call of a batch out. It follows a wait for the device, in which
//! one side may sleep and the other one spin: a thread that slept finds its caches cold.
//!
//! This module must not know managers.

use crate::traces::kernels::{Arguments, PTX};
use crate::traces::vouched::Vouched;
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::condition;
use leasehold_cuda::driver::ops::{
    CopyKind, CudaSlowOps, EventFlags, HostFlags, NativeBatch, NativeContext, NativeCopy,
    NativeEvent, NativeFill, NativeFunction, NativeGraph, NativeGraphExec, NativeModule,
    NativeNode, NativePartition, NativeStream, SourceOrder,
};
use leasehold_hal::{Access, ConditionalKind};
use std::time::Instant;

/// Times of one kind of call, in nanoseconds per call.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// The name of the measured call.
    pub name: String,
    /// Calls per sample.
    pub batch: u32,
    /// The number of samples.
    pub samples: u32,
    /// The calls alone: the median of the samples.
    pub host: f64,
    /// The calls alone: the fastest sample.
    pub host_best: f64,
    /// Until the device has finished: the median.
    pub total: f64,
    /// Until the device has finished: the fastest sample.
    pub total_best: f64,
    /// Bytes that each call moves, or 0.
    pub bytes: u64,
}

impl Figure {
    /// Gigabytes per second until the device has finished, at the median. 0 for a call that moves
    /// nothing.
    #[must_use]
    pub fn gigabytes_per_second(&self) -> f64 {
        if self.total > 0.0 { self.bytes as f64 / self.total } else { 0.0 }
    }

    /// Takes `samples` samples of `batch` calls, after one that does not count. `wait` ends a
    /// sample. The host's time leaves the first call of a larger batch out.
    ///
    /// # Errors
    /// Those of the calls.
    pub fn measure(
        name: impl Into<String>,
        samples: u32,
        batch: u32,
        bytes: u64,
        mut call: impl FnMut() -> Result<()>,
        mut wait: impl FnMut() -> Result<()>,
    ) -> Result<Self> {
        let mut taken = Samples::default();
        for sample in 0..=samples.max(1) {
            taken.take(sample, batch, &mut call, &mut wait)?;
        }
        Ok(taken.figure(name.into(), batch, bytes))
    }

    /// As [`measure`](Self::measure), for two sides that take a sample each in turns, with one call
    /// in a sample.
    ///
    /// # Errors
    /// Those of the calls.
    pub fn in_turns(
        names: [String; 2],
        samples: u32,
        mut calls: [&mut dyn FnMut() -> Result<()>; 2],
        mut waits: [&mut dyn FnMut() -> Result<()>; 2],
    ) -> Result<[Self; 2]> {
        let mut taken = [Samples::default(), Samples::default()];
        for sample in 0..=samples.max(1) {
            for ((taken, call), wait) in taken.iter_mut().zip(&mut calls).zip(&mut waits) {
                taken.take(sample, 1, call, wait)?;
            }
        }
        let ([first, second], [one, two]) = (taken, names);
        Ok([first.figure(one, 1, 0), second.figure(two, 1, 0)])
    }
}

/// The samples of a figure.
#[derive(Default)]
struct Samples {
    hosts: Vec<f64>,
    totals: Vec<f64>,
}

impl Samples {
    /// Takes sample number `sample`, of which the first does not count.
    fn take(
        &mut self,
        sample: u32,
        batch: u32,
        mut call: impl FnMut() -> Result<()>,
        mut wait: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let start = Instant::now();
        call()?;
        let first = start.elapsed();
        for _ in 1..batch {
            call()?;
        }
        let (host, timed) = match batch {
            0 | 1 => (first, 1),
            _ => (start.elapsed() - first, batch - 1),
        };
        wait()?;
        let total = start.elapsed();
        if sample > 0 {
            self.hosts.push(host.as_nanos() as f64 / f64::from(timed));
            self.totals.push(total.as_nanos() as f64 / f64::from(batch));
        }
        Ok(())
    }

    fn figure(mut self, name: String, batch: u32, bytes: u64) -> Figure {
        self.hosts.sort_by(f64::total_cmp);
        self.totals.sort_by(f64::total_cmp);
        Figure {
            name,
            batch,
            samples: self.hosts.len() as u32,
            host: self.hosts[self.hosts.len() / 2],
            host_best: self.hosts[0],
            total: self.totals[self.totals.len() / 2],
            total_best: self.totals[0],
            bytes,
        }
    }
}

/// A driver with the objects of the loops: a stream, an event, a kernel with three buffers, pinned
/// and device memory.
pub struct RawLoop<'a> {
    ops: Vouched<'a>,
    ordinal: u32,
    before: NativeContext,
    stream: NativeStream,
    event: NativeEvent,
    module: NativeModule,
    function: NativeFunction,
    arguments: Arguments,
    device: u64,
    pinned: u64,
}

/// Bytes of the two memories: the largest copy.
pub const LARGEST: u64 = 256 << 20;

/// Pieces of several copies, and the bytes of each.
pub const PIECES: u64 = 1024;
/// See [`PIECES`].
pub const PIECE: u64 = 4096;

/// The places of piece `i` of several copies: on the dense side, and on the side whose places are
/// scattered as a cache's blocks are.
#[must_use]
pub fn places(i: u64) -> (u64, u64) {
    (i * PIECE, i * 389 % PIECES * 2 * PIECE)
}

impl<'a> RawLoop<'a> {
    /// Makes the objects on a device of a started driver. The device's primary context is current
    /// on this thread until the drop.
    ///
    /// # Errors
    /// A driver error.
    pub fn new(ops: &'a dyn CudaSlowOps, ordinal: u32) -> Result<Self> {
        // SAFETY: the loops use only objects made here. The objects live as long as the loops,
        // which are over before the drop destroys them.
        let ops = unsafe { Vouched::new(ops) };
        let before = ops.current()?;
        ops.set_current(ops.primary_retain(ordinal)?)?;
        let module = ops.module_load(PTX.as_bytes())?;
        let function = ops.module_function(module, "trace_nothing")?;
        let (device, pinned) =
            (ops.alloc(LARGEST)?, ops.host_alloc(LARGEST, HostFlags::default())?);
        let memories = [
            (device, 256, Access::ReadWrite),
            (device + 256, 256, Access::ReadWrite),
            (device + 512, 256, Access::ReadWrite),
        ];
        let raw = Self {
            ops,
            ordinal,
            before,
            stream: ops.stream_create(0)?,
            event: ops.event_create(EventFlags::default())?,
            module,
            function,
            arguments: Arguments::new(&memories, &[]),
            device,
            pinned,
        };
        // Touches the memory once, so that no sample includes a first use.
        raw.copy_once(CopyKind::HostToDevice, pinned, LARGEST)?;
        raw.wait()?;
        Ok(raw)
    }

    fn wait(&self) -> Result<()> {
        self.ops.stream_synchronize(self.stream)
    }

    fn copy_once(&self, kind: CopyKind, host: u64, bytes: u64) -> Result<()> {
        let (dst, src) =
            if kind == CopyKind::HostToDevice { (self.device, host) } else { (host, self.device) };
        // SAFETY: both memories live as long as `self` or the caller's buffer, which outlives the
        // wait that ends a sample.
        unsafe { self.ops.copy(self.stream, &NativeCopy::linear(kind, dst, src, bytes)) }
    }

    /// A launch of an empty kernel with three buffers.
    ///
    /// # Errors
    /// A driver error; as for all figures.
    pub fn launch(&self, samples: u32) -> Result<Figure> {
        let launch = self.arguments.launch(self.function, 1, 32);
        // The batch is smaller than the driver's queue, so no call waits for room.
        let call = || {
            // SAFETY: the memory lives as long as `self`.
            unsafe { self.ops.launch(self.stream, &launch) }
        };
        Figure::measure("launch, three buffers", samples, 256, 0, call, || self.wait())
    }

    /// A launch of a graph of `nodes` empty kernels in a chain.
    ///
    /// # Errors
    /// A driver error.
    pub fn graph(&self, nodes: u32, samples: u32) -> Result<Figure> {
        let graph = self.ops.graph_create()?;
        let measured = self.chain(graph, nodes).and_then(|exec| {
            // SAFETY: the memory lives as long as `self`.
            let call = || unsafe { self.ops.exec_launch(exec, self.stream) };
            let figure = Figure::measure(
                format!("graph launch, {nodes} nodes"),
                samples,
                4,
                0,
                call,
                || self.wait(),
            );
            self.ops.exec_destroy(exec).and(figure)
        });
        self.ops.graph_destroy(graph).and(measured)
    }

    /// A launch of a graph with a loop of `rounds` rounds, in turns with `ours`: the same graph of
    /// another library. A fill sets the flag, and one kernel is the body: it counts the flag down.
    ///
    /// # Errors
    /// A driver error; `Unsupported` for a driver without conditional nodes.
    pub fn rounds(
        &self,
        rounds: u32,
        samples: u32,
        ours: (&mut dyn FnMut() -> Result<()>, &mut dyn FnMut() -> Result<()>),
    ) -> Result<[Figure; 2]> {
        let ops = self.ops;
        let setter = ops.module_load(condition::PTX.as_bytes())?;
        let graph = ops.graph_create()?;
        let names = ["the runtime's", "the driver's"];
        let names = names.map(|whose| format!("graph with a loop of {rounds} rounds, {whose}"));
        let measured = self.looping(graph, setter, rounds).and_then(|exec| {
            // SAFETY: the memory lives as long as `self`.
            let mut call = || unsafe { ops.exec_launch(exec, self.stream) };
            let mut wait = || self.wait();
            let figures =
                Figure::in_turns(names, samples, [ours.0, &mut call], [ours.1, &mut wait]);
            let left = self.wait();
            left.and(ops.exec_destroy(exec)).and(figures)
        });
        let ended = ops.graph_destroy(graph).and(ops.module_unload(setter));
        ended.and(measured)
    }

    fn looping(
        &self,
        graph: NativeGraph,
        setter: NativeModule,
        rounds: u32,
    ) -> Result<NativeGraphExec> {
        let ops = self.ops;
        let down = ops.module_function(self.module, "trace_down")?;
        let set = ops.module_function(setter, condition::SET_CONDITION)?;
        let flag = self.device;
        let down = (Arguments::new(&[(flag, 4, Access::ReadWrite)], &[]), down);
        let condition = ops.condition_create(graph)?;
        let set = (Arguments::new(&[(flag, 4, Access::Read)], &condition.0.to_le_bytes()), set);
        let add = |graph, after: &[NativeNode], (arguments, function): &(Arguments, _)| {
            // SAFETY: the memory lives as long as `self`.
            unsafe {
                ops.graph_add_kernel(
                    graph,
                    after,
                    &arguments.launch(*function, 1, 1),
                    NativePartition::NULL,
                )
            }
        };
        let fill = NativeFill { dst: flag, value: rounds, width: 4, count: 1 };
        // SAFETY: the memory lives as long as `self`.
        let filled = unsafe { ops.graph_add_fill(graph, &[], &fill) }?;
        let first = add(graph, &[filled], &set)?;
        let (_, body) =
            ops.graph_add_conditional(graph, &[first], condition, ConditionalKind::While)?;
        let counted = add(body, &[], &down)?;
        add(body, &[counted], &set)?;
        let exec = ops.graph_instantiate(graph)?;
        ops.exec_upload(exec, self.stream)?;
        self.wait()?;
        Ok(exec)
    }

    fn chain(&self, graph: NativeGraph, nodes: u32) -> Result<NativeGraphExec> {
        let launch = self.arguments.launch(self.function, 1, 32);
        let mut last = Vec::new();
        for _ in 0..nodes {
            // SAFETY: the memory lives as long as `self`.
            last = vec![unsafe {
                self.ops.graph_add_kernel(graph, &last, &launch, NativePartition::NULL)?
            }];
        }
        let exec = self.ops.graph_instantiate(graph)?;
        self.ops.exec_upload(exec, self.stream)?;
        self.wait()?;
        Ok(exec)
    }

    /// A copy between pinned and device memory.
    ///
    /// # Errors
    /// `InvalidArgument` for more than [`LARGEST`] bytes, or a driver error.
    pub fn pinned_copy(&self, kind: CopyKind, bytes: u64, samples: u32) -> Result<Figure> {
        let name = format!("{} {bytes} bytes, pinned", direction(kind, bytes)?);
        let batch = if bytes > 1 << 20 { 4 } else { 64 };
        Figure::measure(
            name,
            samples,
            batch,
            bytes,
            || self.copy_once(kind, self.pinned, bytes),
            || self.wait(),
        )
    }

    /// [`PIECES`] copies between pinned and device memory or within it: in one call with this order
    /// of its sources, or one by one.
    ///
    /// # Errors
    /// A driver error; the driver's code 801 for one that has no such call.
    pub fn copies(
        &self,
        kind: CopyKind,
        together: Option<SourceOrder>,
        samples: u32,
    ) -> Result<Figure> {
        let (mut src, mut dst) = (Vec::new(), Vec::new());
        for (dense, scattered) in (0..PIECES).map(places) {
            let (from, to) = match kind {
                CopyKind::HostToDevice => (self.pinned + dense, self.device + scattered),
                CopyKind::DeviceToHost => (self.device + scattered, self.pinned + dense),
                CopyKind::DeviceToDevice => {
                    (self.device + scattered, self.device + LARGEST / 2 + dense)
                }
            };
            src.push(from);
            dst.push(to);
        }
        let bytes = vec![PIECE as usize; src.len()];
        let name = match together {
            Some(order) => format!("cuMemcpyBatchAsync, sources in {order:?} order"),
            None => "single copies".to_owned(),
        };
        let one_by_one = || {
            std::iter::zip(&src, &dst).try_for_each(|(&src, &dst)| {
                let copy = NativeCopy::linear(kind, dst, src, PIECE);
                // SAFETY: the memory lives as long as `self`.
                unsafe { self.ops.copy(self.stream, &copy) }
            })
        };
        let call = || match together {
            Some(order) => {
                let batch = NativeBatch { src: &src, dst: &dst, bytes: &bytes, order };
                // SAFETY: the memory lives as long as `self`. Nobody writes a source, and no piece
                // accesses what another one writes.
                unsafe { self.ops.copy_batch(self.stream, &batch) }
            }
            None => one_by_one(),
        };
        Figure::measure(name, samples, 4, PIECES * PIECE, call, || self.wait())
    }

    /// An asynchronous copy between pageable and device memory.
    ///
    /// # Errors
    /// As [`pinned_copy`](Self::pinned_copy).
    pub fn pageable_copy(&self, kind: CopyKind, bytes: u64, samples: u32) -> Result<Figure> {
        let name = format!("{} {bytes} bytes, pageable", direction(kind, bytes)?);
        self.pageable(name, kind, bytes, samples, || Ok(()))
    }

    /// A copy between pageable and device memory and the wait for it, as one call.
    ///
    /// # Errors
    /// As [`pinned_copy`](Self::pinned_copy).
    pub fn pageable_copy_waited(&self, kind: CopyKind, bytes: u64, samples: u32) -> Result<Figure> {
        let name = format!("{} {bytes} bytes, pageable, and wait", direction(kind, bytes)?);
        self.pageable(name, kind, bytes, samples, || self.wait())
    }

    /// A copy between pageable and device memory, and what follows each.
    fn pageable(
        &self,
        name: String,
        kind: CopyKind,
        bytes: u64,
        samples: u32,
        then: impl Fn() -> Result<()>,
    ) -> Result<Figure> {
        let mut host = vec![1_u8; bytes as usize];
        let at = host.as_mut_ptr() as u64;
        let batch = if bytes > 1 << 20 { 2 } else { 16 };
        let figure = Figure::measure(
            name,
            samples,
            batch,
            bytes,
            || self.copy_once(kind, at, bytes).and_then(|()| then()),
            || self.wait(),
        );
        // The last sample was waited for, unless a call failed.
        let waited = self.wait();
        drop(host);
        waited.and(figure)
    }

    /// An allocation and its free: `cuMemAlloc`, `cuMemFree`.
    ///
    /// # Errors
    /// A driver error.
    pub fn alloc_pair(&self, bytes: u64, samples: u32) -> Result<Figure> {
        let call = || self.ops.free(self.ops.alloc(bytes)?);
        Figure::measure(
            format!("cuMemAlloc and cuMemFree, {bytes} bytes"),
            samples,
            16,
            0,
            call,
            || Ok(()),
        )
    }

    /// An allocation and its free in stream order: `cuMemAllocAsync`, `cuMemFreeAsync`. The pool
    /// keeps freed memory.
    ///
    /// # Errors
    /// A driver error.
    pub fn alloc_async_pair(&self, bytes: u64, samples: u32) -> Result<Figure> {
        self.ops.pool_set_threshold(self.ordinal, u64::MAX)?;
        let call = || {
            let at = self.ops.alloc_async(bytes, self.stream)?;
            self.ops.free_async(at, self.stream)
        };
        let name = format!("cuMemAllocAsync and cuMemFreeAsync, {bytes} bytes");
        let figure = Figure::measure(name, samples, 64, 0, call, || self.wait());
        self.ops.pool_set_threshold(self.ordinal, 0)?;
        figure
    }

    /// A record of an event without timing.
    ///
    /// # Errors
    /// A driver error.
    pub fn event_record(&self, samples: u32) -> Result<Figure> {
        let call = || self.ops.event_record(self.event, self.stream);
        Figure::measure("event record", samples, 256, 0, call, || self.wait())
    }

    /// A word written by the stream.
    ///
    /// # Errors
    /// A driver error.
    pub fn write_word(&self, samples: u32) -> Result<Figure> {
        let mut value = 0;
        let call = || {
            value += 1;
            self.ops.stream_write_word(self.stream, self.pinned, value)
        };
        Figure::measure("write of a word", samples, 256, 0, call, || self.wait())
    }

    /// A launch and the wait for it: a round trip.
    ///
    /// # Errors
    /// A driver error.
    pub fn round_trip(&self, samples: u32) -> Result<Figure> {
        let launch = self.arguments.launch(self.function, 1, 32);
        let call = || {
            // SAFETY: the memory lives as long as `self`.
            unsafe { self.ops.launch(self.stream, &launch)? };
            self.wait()
        };
        Figure::measure("launch and wait", samples, 32, 0, call, || Ok(()))
    }

    /// Reading and setting the current context, the cost of every entry into a library.
    ///
    /// # Errors
    /// A driver error.
    pub fn context_switch(&self, samples: u32) -> Result<Figure> {
        let call = || self.ops.set_current(self.ops.current()?);
        Figure::measure("current context read and set", samples, 1024, 0, call, || Ok(()))
    }

    /// All figures.
    ///
    /// # Errors
    /// A driver error.
    pub fn all(&self, samples: u32) -> Result<Vec<Figure>> {
        use CopyKind::{DeviceToHost as DOWN, HostToDevice as UP};
        let mut figures = vec![
            self.context_switch(samples)?,
            self.launch(samples)?,
            self.round_trip(samples)?,
            self.graph(1, samples)?,
            self.graph(1000, samples)?,
            self.event_record(samples)?,
            self.write_word(samples)?,
        ];
        for bytes in [4 << 10, 1 << 20, 64 << 20] {
            for kind in [UP, DOWN] {
                figures.push(self.pinned_copy(kind, bytes, samples)?);
                figures.push(self.pageable_copy(kind, bytes, samples)?);
            }
        }
        for bytes in [4 << 10, 1 << 20, 64 << 20] {
            figures.push(self.alloc_pair(bytes, samples)?);
            figures.push(self.alloc_async_pair(bytes, samples)?);
        }
        Ok(figures)
    }
}

fn direction(kind: CopyKind, bytes: u64) -> Result<&'static str> {
    if bytes > LARGEST {
        return Err(Error::invalid(format!("a copy of {bytes} bytes; {LARGEST} is the most")));
    }
    match kind {
        CopyKind::HostToDevice => Ok("upload"),
        CopyKind::DeviceToHost => Ok("download"),
        CopyKind::DeviceToDevice => {
            Err(Error::invalid("a copy between host and device is measured"))
        }
    }
}

impl Drop for RawLoop<'_> {
    fn drop(&mut self) {
        // Calls that a lost device refuses have nothing left to free.
        let _ = self.wait();
        let _ = self.ops.event_destroy(self.event);
        let _ = self.ops.stream_destroy(self.stream);
        let _ = self.ops.module_unload(self.module);
        let _ = self.ops.free(self.device);
        let _ = self.ops.host_free(self.pinned);
        let _ = self.ops.set_current(self.before);
        let _ = self.ops.primary_release(self.ordinal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first call of a batch is slow, as after a wait in which the thread slept.
    #[test]
    fn the_first_call_after_a_wait_is_no_part_of_the_hosts_time() {
        let mut calls = 0;
        let call = || {
            if calls % 4 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(4));
            }
            calls += 1;
            Ok(())
        };
        let figure = Figure::measure("x", 5, 4, 0, call, || Ok(())).unwrap();
        assert!(figure.host_best < 500_000.0, "{figure:?}");
        assert!(figure.total_best >= 1_000_000.0, "all of the time counts until done: {figure:?}");
    }

    #[test]
    fn a_figure_is_per_call() {
        let mut calls = 0;
        let figure = Figure::measure(
            "x",
            3,
            10,
            1000,
            || {
                calls += 1;
                Ok(())
            },
            || {
                std::thread::sleep(std::time::Duration::from_millis(1));
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(calls, 40);
        assert_eq!((figure.samples, figure.batch), (3, 10));
        // One millisecond over ten calls.
        assert!(
            figure.total >= 100_000.0
                && figure.total >= figure.host
                && figure.total_best <= figure.total
        );
        assert!(figure.gigabytes_per_second() > 0.0 && figure.gigabytes_per_second() < 0.011);
    }
}
