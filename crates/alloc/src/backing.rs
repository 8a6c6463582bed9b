//! Where memory comes from: the one trait that a backend's allocator glue implements.
//!
//! Two kinds of backing exist. One with *virtual memory management* (`BackingCaps::vmm`) separates
//! addresses from memory: addresses are reserved once, pieces of physical memory (handles) are
//! created, mapped, unmapped and destroyed one by one, and so can be moved to where they are
//! needed. The other gives whole segments, addresses and memory together.
//!
//! The allocator never calls a backing with a lock held, and never from a free (but for `fill` and
//! `verify`, which are no driver calls).

use leasehold_core::{Error, Result};

/// A piece of memory that a backing gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Chunk {
    /// Its address.
    pub addr: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// The native object that spans it (Metal's buffer), else 0.
    pub native: u64,
}

/// The capabilities of a backing.
#[derive(Debug, Clone, Copy)]
pub struct BackingCaps {
    /// Addresses and memory can be had apart: `reserve`, `create`, `map`, `unmap`, `destroy` work.
    pub vmm: bool,
    /// The size in bytes, a power of two, of which reservations, commitments and mappings are
    /// multiples. 2 MiB on CUDA.
    pub granule: u64,
    /// Physical memory in bytes, as far as known: sets how many addresses are reserved (four times
    /// as many). With `vmm`, a larger request fails at once.
    pub physical: u64,
    /// `reserve` works.
    pub reserve: bool,
    /// Without `vmm`: the least size in bytes of a segment.
    pub segment: u64,
    /// With `vmm`: a piece may be mapped at several addresses at once, and work that a stream
    /// orders sees the same bytes through each of them.
    pub aliases: bool,
}

impl Default for BackingCaps {
    fn default() -> Self {
        Self {
            vmm: false,
            granule: 2 << 20,
            physical: 64 << 30,
            reserve: false,
            segment: 32 << 20,
            aliases: false,
        }
    }
}

/// A source of memory. Sizes and addresses are in bytes and multiples of the granule.
///
/// Methods may block on the driver. They are called from any thread, possibly several at once,
/// without any lock of the allocator. After an error the backing must be as before the call.
///
/// Methods that only ask for memory are safe. Methods that name an address or a handle are unsafe,
/// since they change or unmap whatever is there.
///
/// # Safety
/// An allocator lends what a backing gives, and a runtime lets devices write there. The author
/// vouches:
/// - Addresses from [`reserve`](Self::reserve), [`commit`](Self::commit) and [`exact`](Self::exact)
///   are used for nothing else until they are given back.
/// - A committed or mapped range is backed, for as many bytes as asked for, by memory that nobody
///   else has. A backing that backs nothing belongs to no device, so that nobody uses its
///   addresses.
/// - [`caps`](Self::caps) are true and constant.
pub unsafe trait Backing: Send + Sync {
    /// The capabilities of this backing. Constant.
    fn caps(&self) -> BackingCaps;

    /// Reserves `bytes` of addresses, backed by nothing.
    ///
    /// # Errors
    /// The driver's; the allocator then asks for half, down to a quarter, and then falls back to
    /// segments.
    fn reserve(&self, bytes: u64) -> Result<u64>;

    /// Memory with addresses: at `at`, inside a reservation, or anywhere, but at a multiple of 512;
    /// what lies elsewhere is given back at once.
    ///
    /// # Errors
    /// `OutOfMemory`; `DeviceLost`; the driver's.
    ///
    /// # Safety
    /// - `at` is `None`, or the range lies in a reservation of this backing and nothing is
    ///   committed or mapped there.
    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk>;

    /// Gives a commitment back. No work uses it any more.
    ///
    /// # Errors
    /// The driver's; the allocator then never uses the range again and counts it as taken.
    ///
    /// # Safety
    /// - `chunk` came from `commit` of this backing, is given back once, and nobody uses its memory
    ///   any more.
    unsafe fn decommit(&self, chunk: Chunk) -> Result<()>;

    /// Gives a reservation back; nothing is committed in it any more.
    ///
    /// # Safety
    /// - The range came from `reserve` of this backing, is given back once, and nothing is
    ///   committed or mapped in it.
    unsafe fn release(&self, addr: u64, bytes: u64);

    /// Creates a piece of physical memory without addresses. By default a name only:
    /// [`map`](Self::map) then commits.
    ///
    /// # Errors
    /// `OutOfMemory`; `DeviceLost`; the driver's.
    fn create(&self, bytes: u64) -> Result<u64> {
        let _ = bytes;
        Ok(0)
    }

    /// Gives a piece of physical memory, mapped nowhere, back to the driver.
    ///
    /// # Errors
    /// The driver's; the piece is then counted as leaked.
    ///
    /// # Safety
    /// - `handle` came from `create(bytes)` of this backing, is mapped nowhere and given back once.
    unsafe fn destroy(&self, handle: u64, bytes: u64) -> Result<()> {
        let _ = (handle, bytes);
        Ok(())
    }

    /// Maps a piece at an address inside a reservation.
    ///
    /// # Errors
    /// `OutOfMemory`; `DeviceLost`; the driver's.
    ///
    /// # Safety
    /// - The range lies in a reservation of this backing with nothing mapped there; `handle` came
    ///   from its `create(bytes)` and is not mapped, unless the backing can do
    ///   [`aliases`](BackingCaps::aliases).
    unsafe fn map(&self, at: u64, handle: u64, bytes: u64) -> Result<()> {
        let _ = handle;
        // SAFETY: the caller names an unused range of a reservation, which is what a commitment
        // there wants.
        unsafe { self.commit(Some(at), bytes) }.map(|_| ())
    }

    /// Makes a range of pieces, mapped one after the other, accessible to the device: one call for
    /// all of them.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's.
    ///
    /// # Safety
    /// - All of the range is mapped.
    unsafe fn enable(&self, at: u64, bytes: u64) -> Result<()> {
        let _ = (at, bytes);
        Ok(())
    }

    /// Unmaps a piece. No work uses the range any more.
    ///
    /// # Errors
    /// The driver's; the allocator then never uses the range again and counts it as taken.
    ///
    /// # Safety
    /// - The range is one of `map` of this backing, and nobody uses it any more.
    unsafe fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        // SAFETY: the range was mapped by `map`, whose default is a commitment of the same range.
        unsafe { self.decommit(Chunk { addr: at, bytes, native: 0 }) }
    }

    /// Fills memory, as the host, while no work uses it. For the debug checks; may be called from a
    /// free, so it must not wait for a device. Zero bytes ask whether it works.
    ///
    /// # Errors
    /// `Unsupported`, always, where the host cannot write the memory.
    ///
    /// # Safety
    /// - `bytes` is 0, or the range is committed or mapped memory of this backing that nobody uses.
    unsafe fn fill(&self, at: u64, bytes: u64, byte: u8) -> Result<()> {
        let _ = (at, bytes, byte);
        Err(Error::Unsupported("this backing's memory cannot be written by the host".into()))
    }

    /// The offset of the first byte that is not `byte`, read by the host while no work uses the
    /// memory. As [`fill`](Self::fill) otherwise.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    ///
    /// # Safety
    /// - `bytes` is 0, or the range is committed or mapped memory of this backing that nobody
    ///   writes meanwhile.
    unsafe fn verify(&self, at: u64, bytes: u64, byte: u8) -> Result<Option<u64>> {
        let _ = (at, bytes, byte);
        Err(Error::Unsupported("this backing's memory cannot be read by the host".into()))
    }

    /// Memory of exactly `bytes` at an address aligned to `align`, the plain way (`cuMemAlloc`,
    /// `malloc`), so that the vendor's memory checkers know its bounds. By default a commitment of
    /// whole granules.
    ///
    /// # Errors
    /// As [`commit`](Self::commit); `Unsupported` for an alignment that it cannot give.
    fn exact(&self, bytes: u64, align: u64) -> Result<Chunk> {
        let granule = self.caps().granule;
        if align > granule {
            return Err(Error::Unsupported(
                format!("an alignment of {align}: the granule is {granule}").into(),
            ));
        }
        // SAFETY: at no address in particular.
        unsafe { self.commit(None, bytes.next_multiple_of(granule)) }
    }

    /// Gives back what [`exact`](Self::exact) gave for `align`. No work uses it any more.
    ///
    /// # Errors
    /// As [`decommit`](Self::decommit).
    ///
    /// # Safety
    /// - `chunk` came from `exact` of this backing with the same `align`, is given back once, and
    ///   nobody uses its memory any more.
    unsafe fn exact_free(&self, chunk: Chunk, align: u64) -> Result<()> {
        let _ = align;
        // SAFETY: the chunk is a commitment, as `exact` gives them by default, and the caller gives
        // it back once.
        unsafe { self.decommit(chunk) }
    }

    /// How many calls to the driver this backing has made so far.
    fn driver_calls(&self) -> u64 {
        0
    }
}
