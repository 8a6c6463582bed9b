//! Figures of a manager, in the layout of the C ABI.

use crate::misuse::MISUSE_COUNT;

/// Figures of one manager over all threads, in bytes or as counts.
///
/// The figures of different threads are read one after the other. They are exact if no other thread
/// uses the manager. The peak of live objects is exact for one thread, and otherwise within 64
/// objects for each thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Stats {
    /// Size of this struct in bytes. A C caller sets it before the call and gets as many bytes.
    pub size: u64,
    /// Objects with a count.
    pub live_objects: u64,
    /// Tensors with a count.
    pub live_tensors: u64,
    /// Bytes of the live objects whose size is known.
    pub live_bytes: u64,
    /// Highest number of objects with a count.
    pub peak_live_objects: u64,
    /// Highest number of bytes of live objects whose size is known.
    pub peak_live_bytes: u64,
    /// Tensors in the pool.
    pub pooled_tensors: u64,
    /// Bytes of the pooled tensors.
    pub pooled_bytes: u64,
    /// Highest number of bytes in the pool.
    pub peak_pooled_bytes: u64,
    /// Dead tensors that wait for the end of their scope.
    pub quarantined_tensors: u64,
    /// Bytes of the quarantined tensors.
    pub quarantined_bytes: u64,
    /// Highest number of bytes in quarantine.
    pub peak_quarantined_bytes: u64,
    /// Current slot buffers of all frames.
    pub slot_buffers: u64,
    /// Bytes of the current slot buffers.
    pub slot_bytes: u64,
    /// Outgrown slot buffers that wait for `function_exit`.
    pub deferred_buffers: u64,
    /// Bytes of the outgrown buffers.
    pub deferred_bytes: u64,
    /// Sum of the present threads' peaks of slot and deferred bytes.
    pub peak_slot_bytes: u64,
    /// Threads attached.
    pub threads: u64,
    /// Misuses by kind ([`Misuse`](crate::Misuse)), all threads since the start.
    pub misuses: [u64; MISUSE_COUNT],
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            size: size_of::<Self>() as u64,
            live_objects: 0,
            live_tensors: 0,
            live_bytes: 0,
            peak_live_objects: 0,
            peak_live_bytes: 0,
            pooled_tensors: 0,
            pooled_bytes: 0,
            peak_pooled_bytes: 0,
            quarantined_tensors: 0,
            quarantined_bytes: 0,
            peak_quarantined_bytes: 0,
            slot_buffers: 0,
            slot_bytes: 0,
            deferred_buffers: 0,
            deferred_bytes: 0,
            peak_slot_bytes: 0,
            threads: 0,
            misuses: [0; MISUSE_COUNT],
        }
    }
}

impl Stats {
    /// The number of misuses of a kind.
    pub fn misuse(&self, misuse: crate::Misuse) -> u64 {
        self.misuses[misuse as usize]
    }

    /// The number of all misuses.
    pub fn total_misuses(&self) -> u64 {
        self.misuses.iter().sum()
    }
}

const _: () = assert!(size_of::<Stats>() == 8 * (18 + MISUSE_COUNT));
