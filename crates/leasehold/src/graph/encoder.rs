//! The encoder: what an operator puts its work into.

use crate::kernel::{KernelBase, KernelSession, session_ops, session_sync_ops};
use crate::ops;
use crate::runtime::Runtime;
use crate::stream::Stream;
use crate::view::{Operand, Slice};
use leasehold_alloc::{Buffer, Layout};
use leasehold_core::{Lease, Result};

/// Puts launches, copies and fills on a stream, or on the recording of the calling thread.
#[derive(Debug)]
pub struct Encoder<'a> {
    runtime: &'a Runtime,
    stream: &'a Stream,
}

impl<'a> Encoder<'a> {
    /// An encoder of a stream.
    #[must_use]
    pub fn new(runtime: &'a Runtime, stream: &'a Stream) -> Self {
        Self { runtime, stream }
    }

    /// The runtime.
    #[must_use]
    pub fn runtime(&self) -> &'a Runtime {
        self.runtime
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &'a Stream {
        self.stream
    }

    /// A temporary buffer. While recording it is packed with the graph's other temporaries; otherwise its memory is free for
    /// reuse on this stream as soon as it is dropped.
    ///
    /// # Errors
    /// As [`Runtime::alloc`].
    pub fn temporary(&self, bytes: u64) -> Result<Lease<Buffer>> {
        self.runtime.alloc_on(self.stream, Layout::new(bytes))
    }

    /// One launch: waits for the operands, binds them in order, sets the parameters' bytes, dispatches, updates the tokens.
    ///
    /// # Errors
    /// As the session's steps.
    #[inline]
    pub fn launch(
        &mut self,
        kernel: &KernelBase,
        operands: &[Operand<'_>],
        params: &[u8],
        grid: [u32; 3],
        block: [u32; 3],
    ) -> Result<()> {
        let session = KernelSession::begin(kernel, self.stream)?;
        let session = session_sync_ops::wait(session, operands)?;
        let session = session_ops::bind(session, operands)?;
        let session = session_ops::params_bytes(session, params)?;
        let session = session_ops::dispatch_3d(session, grid, block, 0)?;
        session_sync_ops::update_tokens(session).finish().map(drop)
    }

    /// A copy within the device.
    ///
    /// # Errors
    /// As [`ops::copy`].
    pub fn copy(&mut self, dst: Slice<'_>, src: Slice<'_>) -> Result<()> {
        ops::copy(self.stream, dst, src)
    }

    /// A fill.
    ///
    /// # Errors
    /// As [`ops::fill`].
    pub fn fill(&mut self, dst: Slice<'_>, pattern: ops::Pattern) -> Result<()> {
        ops::fill(self.stream, dst, pattern)
    }
}
