//! A stream, memory and captured graphs of the driver alone: what a loop over another library of
//! the vendor's needs beside that library.
//!
//! Such a library enqueues its calls on a stream by the stream's word. A benchmark calls it here,
//! and through the code above the driver, in the same process.
//!
//! This module must not know managers or libraries.

use crate::traces::vouched::Vouched;
use leasehold_core::Result;
use leasehold_cuda::driver::ops::{
    CudaSlowOps, NativeContext, NativeFill, NativeGraphExec, NativeStream,
};

/// A stream of a device, and memory there.
pub struct RawStream<'a> {
    ops: Vouched<'a>,
    ordinal: u32,
    context: NativeContext,
    before: NativeContext,
    stream: NativeStream,
    memory: u64,
    bytes: u64,
}

impl<'a> RawStream<'a> {
    /// Makes a stream and `bytes` bytes of memory on a device of a started driver. The memory is
    /// zero. The device's primary context is current on this thread until the drop.
    ///
    /// # Errors
    /// A driver error.
    pub fn new(ops: &'a dyn CudaSlowOps, ordinal: u32, bytes: u64) -> Result<Self> {
        // SAFETY: this value and those that borrow it use only objects made here, which live as
        // long as they do.
        let ops = unsafe { Vouched::new(ops) };
        let before = ops.current()?;
        let context = ops.primary_retain(ordinal)?;
        ops.set_current(context)?;
        let (memory, stream) = (ops.alloc(bytes)?, ops.stream_create(0)?);
        let raw = Self { ops, ordinal, context, before, stream, memory, bytes };
        let zero = NativeFill { dst: memory, value: 0, width: 1, count: bytes };
        // SAFETY: the memory lives as long as `raw`, whose drop waits for the stream.
        unsafe { ops.fill(stream, &zero)? };
        raw.synchronize()?;
        Ok(raw)
    }

    /// The stream, as the vendor's libraries take it.
    #[must_use]
    pub fn word(&self) -> u64 {
        self.stream.0
    }

    /// The address of the memory.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.memory
    }

    /// Waits for the stream's work.
    ///
    /// # Errors
    /// A driver error.
    pub fn synchronize(&self) -> Result<()> {
        self.ops.stream_synchronize(self.stream)
    }

    /// Captures what `calls` enqueues on the stream, as a graph that is ready on the device.
    ///
    /// # Errors
    /// That of `calls`; a driver error.
    pub fn capture(&self, calls: impl FnOnce() -> Result<()>) -> Result<RawGraph<'_>> {
        self.ops.capture_begin(self.stream)?;
        let made = calls();
        // A capture that began ends, also after an error.
        let graph = self.ops.capture_end(self.stream)?;
        let exec = made.and_then(|()| self.ops.graph_instantiate(graph));
        let destroyed = self.ops.graph_destroy(graph);
        let raw = RawGraph { on: self, exec: exec? };
        destroyed?;
        self.ops.exec_upload(raw.exec, self.stream)?;
        self.synchronize()?;
        Ok(raw)
    }

    /// As much memory on another device, with access by this one where the devices allow it.
    ///
    /// # Errors
    /// A driver error.
    pub fn peer(&self, ordinal: u32) -> Result<RawPeer<'_>> {
        let context = self.ops.primary_retain(ordinal)?;
        let memory = self.ops.set_current(context).and_then(|()| self.ops.alloc(self.bytes));
        let back = self.ops.set_current(self.context);
        let raw = RawPeer { on: self, ordinal, context, memory: memory? };
        back?;
        if self.ops.can_access_peer(self.ordinal, ordinal)? {
            self.ops.enable_peer(context)?;
        }
        Ok(raw)
    }
}

impl Drop for RawStream<'_> {
    fn drop(&mut self) {
        // Calls that a lost device refuses have nothing left to free.
        let _ = self.synchronize();
        let _ = self.ops.stream_destroy(self.stream);
        let _ = self.ops.free(self.memory);
        let _ = self.ops.set_current(self.before);
        let _ = self.ops.primary_release(self.ordinal);
    }
}

/// A graph that was captured on a stream.
pub struct RawGraph<'s> {
    on: &'s RawStream<'s>,
    exec: NativeGraphExec,
}

impl RawGraph<'_> {
    /// Launches the graph on the stream that it was captured on.
    ///
    /// # Errors
    /// A driver error.
    pub fn launch(&self) -> Result<()> {
        // SAFETY: graph and stream live; who enqueued the captured calls vouched for their memory.
        unsafe { self.on.ops.exec_launch(self.exec, self.on.stream) }
    }
}

impl Drop for RawGraph<'_> {
    fn drop(&mut self) {
        let _ = self.on.synchronize();
        let _ = self.on.ops.exec_destroy(self.exec);
    }
}

/// Memory on another device than a stream's.
pub struct RawPeer<'s> {
    on: &'s RawStream<'s>,
    ordinal: u32,
    context: NativeContext,
    memory: u64,
}

impl RawPeer<'_> {
    /// Copies the first bytes of the stream's memory here: `cuMemcpyPeerAsync`.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If the memory has fewer bytes.
    pub fn copy(&self, bytes: u64) -> Result<()> {
        let on = self.on;
        assert!(bytes <= on.bytes, "{bytes} bytes of {}", on.bytes);
        let (dst, src) = ((self.memory, self.context), (on.memory, on.context));
        // SAFETY: both memories have as many bytes, and live until the drop has waited.
        unsafe { on.ops.copy_peer(on.stream, dst, src, bytes) }
    }
}

impl Drop for RawPeer<'_> {
    fn drop(&mut self) {
        let (on, ops) = (self.on, self.on.ops);
        let _ = on.synchronize();
        let _ = ops.set_current(self.context);
        let _ = ops.free(self.memory);
        let _ = ops.set_current(on.context);
        let _ = ops.primary_release(self.ordinal);
    }
}
