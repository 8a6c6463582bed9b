//! The bound of uncompleted command buffers of a queue.
//!
//! A command buffer takes a [`Permit`] when it is made. The permit ends with the command buffer's
//! completion. The driver's own bound is the same number, so the driver never blocks in
//! `commandBuffer`.
//!
//! A stream that takes the last permit commits at the end of the submission. So the command buffers
//! that stay open between submissions never use all permits, and a waiting thread always waits for
//! committed work.
//!
//! This module must not know streams.

use super::in_flight::Flight;
use super::permit::{Permit, Permits};
use leasehold_core::Result;
use leasehold_core::sync::{Arc, Mutex, thread};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Weak;

/// The permits of a queue.
pub(crate) struct Room {
    permits: Permits,
    /// The committed command buffers of all streams, in the order of their commits.
    flights: Mutex<VecDeque<Weak<Flight>>>,
}

impl Room {
    /// Room for `most` uncompleted command buffers.
    pub(crate) fn new(most: u32) -> Arc<Self> {
        Arc::new(Self { permits: Permits::new(most), flights: Mutex::new(VecDeque::new()) })
    }

    /// Takes a permit, if one is free.
    pub(crate) fn take(&self) -> Option<Permit> {
        self.permits.take()
    }

    /// Whether no permit is free.
    pub(crate) fn is_full(&self) -> bool {
        self.permits.is_full()
    }

    /// Adds a committed command buffer.
    pub(crate) fn add(&self, flight: &Arc<Flight>) {
        self.oldest();
        self.flights.lock().push_back(Arc::downgrade(flight));
    }

    /// The oldest command buffer that is not over.
    fn oldest(&self) -> Option<Arc<Flight>> {
        let mut flights = self.flights.lock();
        loop {
            match flights.front()?.upgrade() {
                Some(flight) if !flight.is_over() => return Some(flight),
                _ => drop(flights.pop_front()),
            }
        }
    }

    /// Asks the driver whether a command buffer is over, so that its permit is free. Does not
    /// block.
    pub(crate) fn poll(&self) {
        if let Some(Err(error)) = self.oldest().map(|flight| flight.poll()) {
            tracing::debug!(%error, "a command buffer could not be queried");
        }
    }

    /// Waits until a permit is free. Another thread may take it first.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) fn wait(&self) -> Result<()> {
        while self.is_full() {
            match self.oldest() {
                Some(flight) => flight.wait()?,
                // The permits are those of submissions that are being encoded.
                None => thread::yield_now(),
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room({:?})", self.permits)
    }
}
