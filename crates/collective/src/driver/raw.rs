//! NCCL's own calls, for a benchmark beside them (feature `bench`).
//!
//! They are here because [`nccl`](super::nccl) alone loads the library and names its functions. A
//! benchmark calls them through the same table, with nothing between: no check, no lock, no
//! declared access. So the two sides differ in what this crate adds, and in nothing else.

use super::nccl::{Api, Id, Nccl, RawComm};
use leasehold::Result;
use std::ffi::{c_int, c_void};

/// `ncclFloat32`.
const FLOAT: c_int = 7;
/// `ncclSum`.
const SUM: c_int = 0;

/// A communicator of NCCL. It stays the library's unless it is [destroyed](Self::destroy).
pub struct RawNccl {
    api: &'static Api,
    comm: RawComm,
}

impl RawNccl {
    /// `ncclCommInitRank` on the driver's current device. Blocks until all ranks have called it.
    /// The id is [`unique_id`](crate::CollectiveOps::unique_id)'s, of one rank.
    ///
    /// # Errors
    /// `Unavailable` without the library; `InvalidArgument` for an id that is not NCCL's; the
    /// library's own.
    pub fn init(id: &[u8], size: u32, rank: u32) -> Result<Self> {
        let Nccl(api) = Nccl::load()?;
        let id = Id::of(id)?;
        let mut comm: RawComm = std::ptr::null_mut();
        // SAFETY: the place is for a communicator.
        unsafe { api.functions.init(&raw mut comm, size as c_int, id, rank as c_int) }?;
        Ok(Self { api, comm })
    }

    /// `ncclAllReduce`: the sum of `count` floats at the address `at`, in place.
    ///
    /// # Errors
    /// The library's own.
    ///
    /// # Safety
    /// - `stream` is a native stream of the communicator's device. Work on it, and in graphs
    ///   captured from it, may read and write the floats. They stay until that work is over.
    /// - That work is over before [`destroy`](Self::destroy), and none of it is launched after.
    /// - No other thread calls the library for this device meanwhile.
    pub unsafe fn all_reduce(&self, stream: u64, at: u64, count: usize) -> Result<()> {
        let (at, stream) = (at as usize as *mut c_void, stream as usize as *mut c_void);
        // SAFETY: the caller vouches for stream and memory; the communicator lives.
        unsafe { self.api.functions.all_reduce(at, at, count, FLOAT, SUM, self.comm, stream) }
    }

    /// A group of `ncclSend` and `ncclRecv`: `count` floats at the first address to rank `to`, and
    /// as many from rank `from` to the second address.
    ///
    /// # Errors
    /// The library's own.
    ///
    /// # Safety
    /// - As [`all_reduce`](Self::all_reduce), with the floats at both addresses. They do not
    ///   overlap.
    pub unsafe fn exchange(
        &self,
        stream: u64,
        (src, to): (u64, u32),
        (dst, from): (u64, u32),
        count: usize,
    ) -> Result<()> {
        let f = &self.api.functions;
        let [src, dst, stream] = [src, dst, stream].map(|word| word as usize as *mut c_void);
        let (to, from) = (to as c_int, from as c_int);
        // SAFETY: the caller vouches for stream and memory; the communicator lives. A group that
        // began ends, also after an error.
        unsafe {
            f.group_start()?;
            let sent = f.send(src, count, FLOAT, to, self.comm, stream);
            let received = f.recv(dst, count, FLOAT, from, self.comm, stream);
            f.group_end().and(sent).and(received)
        }
    }

    /// `ncclCommDestroy`. Blocks.
    ///
    /// # Errors
    /// The library's own.
    pub fn destroy(self) -> Result<()> {
        // SAFETY: the communicator lives until here, and nothing names it any more.
        unsafe { self.api.functions.destroy(self.comm) }
    }
}
