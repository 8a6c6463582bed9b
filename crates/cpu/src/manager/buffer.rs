//! Buffers: a view over an allocator's block table. No second pool exists.
//!
//! This module must not know where memory comes from.

use leasehold_alloc::Allocator;
use leasehold_hal::engine::buffers::Buffers;

/// The buffers of one kind of memory: allocation, look-up, life cycle, statistics.
pub type BufferManager<'a> = Buffers<&'a Allocator>;
