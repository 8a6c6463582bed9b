//! Large copies in host memory by a few threads, also of bytes that come and go in pieces.
//!
//! A copy larger than the caches bypasses them with streaming stores: no reader follows at once,
//! and a line that is overwritten whole need not be fetched. A copy of a millisecond and more is
//! divided among a few threads, because one thread does not saturate the memory.
//!
//! # Protocol
//! The bytes are cut into chunks. Each thread claims the next chunk, copies it and says so.
//!
//! | field | meaning | written |
//! |---|---|---|
//! | `ready` | the number of chunks that may be copied | by the caller's thread |
//! | `next` | the number of chunks that were claimed, at most `ready` | by the claiming thread |
//! | `copied` | whether a chunk is copied | by the thread that claimed the chunk |
//! | `stop` | no chunk is claimed any more | by the caller's thread |
//!
//! The caller's thread copies chunks too, and no other thread calls the caller's functions. A
//! helper that finds nothing to claim spins for a moment and parks. The caller's thread unparks the
//! helpers whenever it changes `ready` or `stop`. The threads end with the copy.
//!
//! This module must not know devices.

use crate::Result;
use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{spin_loop, thread};
use std::thread::{Builder, available_parallelism, scope};

/// Bytes of a chunk. The lengths of rings are multiples of it. Under Miri all sizes are small.
pub const CHUNK: usize = if cfg!(miri) { 128 } else { 512 << 10 };
/// Copies of this many bytes and more bypass the caches.
#[cfg(any(test, all(target_arch = "x86_64", not(miri))))]
const PAST_CACHES: usize = if cfg!(miri) { 1024 } else { 4 << 20 };
/// The least bytes per thread: a thread starts in a twentieth of the time that they take.
const SHARE: usize = if cfg!(miri) { 1024 } else { 4 << 20 };
/// The most threads, including the caller; at most every second processor.
const THREADS: usize = 8;
/// How often a thread looks for work before a helper parks and the caller yields.
const SPINS: u32 = 2000;
/// How often the caller looks for finished chunks before it asks again whether more may be copied.
const LOOKS: u32 = 64;

/// A copy: its source, its destination and its length.
#[derive(Debug, Clone, Copy)]
pub struct CopyRequest {
    /// The source's first byte.
    pub src: *const u8,
    /// Bytes after which the source starts again at its first byte: a ring. `None` for a source as
    /// long as the copy.
    pub src_ring: Option<usize>,
    /// The destination's first byte.
    pub dst: *mut u8,
    /// As [`src_ring`](Self::src_ring), of the destination.
    pub dst_ring: Option<usize>,
    /// Bytes of the copy.
    pub bytes: usize,
}

/// Copies `bytes` bytes between ranges that do not overlap. Blocks until all bytes are copied. A
/// large copy is divided among a few threads.
///
/// ```
/// let (from, mut to) = (vec![7u8; 10_000], vec![0u8; 10_000]);
/// // SAFETY: both vectors have this length.
/// unsafe { leasehold_core::host_copy::copy(from.as_ptr(), to.as_mut_ptr(), from.len()) };
/// assert!(from == to);
/// ```
///
/// # Safety
/// - `src` is valid for reads and `dst` for writes of `bytes` bytes, both by any thread. The ranges
///   do not overlap. During the call no other thread writes to the source or accesses the
///   destination.
pub unsafe fn copy(src: *const u8, dst: *mut u8, bytes: usize) {
    if threads_for(bytes) == 1 {
        // SAFETY: the caller vouches for both ranges.
        return unsafe { copy_alone(src, dst, bytes, bytes) };
    }
    let request = CopyRequest { src, src_ring: None, dst, dst_ring: None, bytes };
    // SAFETY: the caller vouches for both ranges, and all bytes may be copied at once.
    let copied = unsafe { copy_in_order(request, |_| Ok(bytes), |_| Ok(())) };
    debug_assert!(copied.is_ok(), "neither function fails");
}

/// Copies bytes that become ready from front to back, by a few threads if they are many. Blocks
/// until all bytes are copied.
///
/// `ready` returns the number of bytes, from the front, that may be copied by now; a rest of less
/// than a [`CHUNK`] waits for its chunk. Its argument says whether all such bytes are copied: then
/// the call may block, because this thread has nothing else to do. `done` is told how many bytes
/// from the front are copied, each time the number has grown. Both are called by this thread alone.
///
/// # Errors
/// Those of `ready` and `done`. Then no thread copies any more, and some bytes may be copied.
///
/// # Panics
/// If a ring's length is no multiple of [`CHUNK`].
///
/// # Safety
/// - Each side is valid for its length, for reads of the source and writes of the destination, by
///   any thread. The sides do not overlap.
/// - Once `ready` has returned a number, no other thread writes to the source or accesses the
///   destination of the bytes up to it, until `done` was told that they are copied or this call has
///   returned.
pub unsafe fn copy_in_order(
    request: CopyRequest,
    ready: impl FnMut(bool) -> Result<usize>,
    done: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller vouches for the sides.
    unsafe { copy_by(threads_for(request.bytes), request, ready, done) }
}

/// As [`copy_in_order`], with the given number of threads, if the system has so many.
///
/// # Safety
/// - As [`copy_in_order`].
unsafe fn copy_by(
    threads: usize,
    request: CopyRequest,
    mut ready: impl FnMut(bool) -> Result<usize>,
    mut done: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    for ring in [request.src_ring, request.dst_ring].into_iter().flatten() {
        assert!(ring > 0 && ring % CHUNK == 0, "a ring of {ring} bytes");
    }
    let chunks = request.bytes.div_ceil(CHUNK);
    let work = Work {
        request,
        ready: AtomicUsize::new(0),
        next: AtomicUsize::new(0),
        copied: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
        stop: AtomicBool::new(false),
    };
    let work = &work;
    scope(|scope| {
        let mut copiers = CopyThreads { work, helpers: Vec::new() };
        for _ in 1..threads {
            // SAFETY: the caller vouches for the chunks that it says are ready.
            let help = move || unsafe { work.help() };
            match Builder::new().name("leasehold copy".into()).spawn_scoped(scope, help) {
                Ok(helper) => copiers.helpers.push(helper.thread().clone()),
                // The threads that there are copy all chunks.
                Err(_) => break,
            }
        }
        // SAFETY: the caller vouches for the chunks that it says are ready.
        unsafe { copiers.coordinate(&mut ready, &mut done) }
    })
}

/// The number of threads for a copy, including the caller.
fn threads_for(bytes: usize) -> usize {
    static FOUND: OnceLock<usize> = OnceLock::new();
    let most = *FOUND
        .get_or_init(|| available_parallelism().map_or(1, |n| (n.get() / 2).clamp(1, THREADS)));
    (bytes / SHARE).clamp(1, most)
}

/// A copy that several threads make.
struct Work {
    request: CopyRequest,
    ready: AtomicUsize,
    next: AtomicUsize,
    copied: Box<[AtomicBool]>,
    stop: AtomicBool,
}

// SAFETY: the threads copy through the sides' addresses by the protocol: each chunk by the one
// thread that claimed it. The caller of `copy_in_order` lets any thread access both sides.
unsafe impl Sync for Work {}

impl Work {
    /// Claims the next chunk that is ready.
    fn claim(&self) -> Option<usize> {
        let mut next = self.next.load(Ordering::Relaxed);
        loop {
            // The bytes of a chunk that is ready were written before `ready` was.
            if next >= self.ready.load(Ordering::Acquire) || self.stop.load(Ordering::Relaxed) {
                return None;
            }
            match self.next.compare_exchange_weak(
                next,
                next + 1,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(next),
                Err(now) => next = now,
            }
        }
    }

    /// Copies a chunk.
    ///
    /// # Safety
    /// - This thread has claimed the chunk, and the contract of [`copy_in_order`] holds for it.
    unsafe fn copy(&self, chunk: usize) {
        let CopyRequest { src, src_ring, dst, dst_ring, bytes } = self.request;
        let at = chunk * CHUNK;
        let place = |ring: Option<usize>| ring.map_or(at, |length| at % length);
        // SAFETY: the chunk lies within both sides: a ring's length is a multiple of a chunk's.
        unsafe {
            let (from, to) = (src.add(place(src_ring)), dst.add(place(dst_ring)));
            copy_alone(from, to, CHUNK.min(bytes - at), bytes);
        }
        // The thread that sees the mark sees the bytes.
        self.copied[chunk].store(true, Ordering::Release);
    }

    /// Copies chunks until all are claimed.
    ///
    /// # Safety
    /// - The contract of [`copy_in_order`] holds.
    unsafe fn help(&self) {
        let mut looks = 0;
        while self.next.load(Ordering::Relaxed) < self.copied.len()
            && !self.stop.load(Ordering::Relaxed)
        {
            if let Some(chunk) = self.claim() {
                // SAFETY: claimed above.
                unsafe { self.copy(chunk) };
                looks = 0;
            } else if looks < SPINS {
                looks += 1;
                spin_loop();
            } else {
                thread::park();
            }
        }
    }
}

/// The caller's thread and its helpers. The drop lets the helpers end.
struct CopyThreads<'a> {
    work: &'a Work,
    helpers: Vec<thread::Thread>,
}

impl CopyThreads<'_> {
    fn wake(&self) {
        self.helpers.iter().for_each(thread::Thread::unpark);
    }

    /// Leads a copy to its end.
    ///
    /// # Safety
    /// - The contract of [`copy_in_order`] holds.
    unsafe fn coordinate(
        &self,
        ready: &mut dyn FnMut(bool) -> Result<usize>,
        done: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let Work { request, copied, .. } = self.work;
        let (mut limit, mut front, mut looks) = (0, 0, 0u32);
        while front < copied.len() {
            // Before each of its own chunks this thread asks, so that no helper waits for longer.
            if limit < copied.len() && (front == limit || looks.is_multiple_of(LOOKS)) {
                let bytes = ready(front == limit)?;
                let now = if bytes >= request.bytes { copied.len() } else { bytes / CHUNK };
                if now > limit {
                    limit = now;
                    self.work.ready.store(limit, Ordering::Release);
                    self.wake();
                }
            }
            if let Some(chunk) = self.work.claim() {
                // SAFETY: claimed above.
                unsafe { self.work.copy(chunk) };
                looks = 0;
            } else if front < limit {
                // A helper copies the chunk at the front.
                looks += 1;
                if looks < SPINS { spin_loop() } else { thread::yield_now() }
            }
            let before = front;
            while front < limit && copied[front].load(Ordering::Acquire) {
                front += 1;
            }
            if front > before {
                looks = 0;
                done((front * CHUNK).min(request.bytes))?;
            }
        }
        Ok(())
    }
}

impl Drop for CopyThreads<'_> {
    fn drop(&mut self) {
        self.work.stop.store(true, Ordering::Relaxed);
        self.wake();
    }
}

/// Copies `bytes` bytes of a copy of `all` bytes by this thread.
///
/// # Safety
/// - As [`copy`].
unsafe fn copy_alone(src: *const u8, dst: *mut u8, bytes: usize, all: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if all >= PAST_CACHES {
        // SAFETY: both sides are `bytes` long (the contract of this function).
        return unsafe { past_caches(src, dst, bytes) };
    }
    let _ = all;
    // SAFETY: both sides are `bytes` long (the contract of this function).
    unsafe { crate::copy_bytes(src, dst, bytes) };
}

/// Copies with streaming stores that bypass the caches.
///
/// # Safety
/// - As [`copy`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn past_caches(src: *const u8, dst: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: all accesses lie within the ranges. Every x86-64 processor has these instructions.
    // The streaming stores are to aligned addresses. The fence makes the stores visible before
    // anything that follows.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        for line in 0..lines {
            let at = head + line * LINE;
            let (from, to) = (src.add(at).cast::<__m128i>(), dst.add(at).cast::<__m128i>());
            // All loads first: they are under way together.
            let (a, b) = (_mm_loadu_si128(from), _mm_loadu_si128(from.add(1)));
            let (c, d) = (_mm_loadu_si128(from.add(2)), _mm_loadu_si128(from.add(3)));
            _mm_stream_si128(to, a);
            _mm_stream_si128(to.add(1), b);
            _mm_stream_si128(to.add(2), c);
            _mm_stream_si128(to.add(3), d);
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), bytes - tail);
    }
}

#[cfg(test)]
#[path = "../tests/unit/host_copy.rs"]
mod tests;
