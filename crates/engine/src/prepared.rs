//! Preparations of a submission's operations, made before the stream's lock is taken.
//!
//! This module must not know what is prepared.

use crate::driver::{DriverStream, NativeWait};
use leasehold_core::Error;

/// The preparation of an operation.
pub(crate) enum Ready<N: DriverStream> {
    /// The operation needs no preparation.
    Plain,
    /// The wait goes to the driver.
    Wait(NativeWait<N>),
    /// The driver's own preparation.
    Driver(N::Preparation),
    /// The operation must wait for the host.
    Blocked,
    /// The timepoint that the operation waits for has failed.
    Failed(Error),
}

/// The preparations of a submission's operations, by index.
pub(crate) struct Prepared<N: DriverStream> {
    few: [Option<(usize, Ready<N>)>; 4],
    more: Vec<(usize, Ready<N>)>,
}

impl<N: DriverStream> Default for Prepared<N> {
    #[inline]
    fn default() -> Self {
        Self { few: [const { None }; 4], more: Vec::new() }
    }
}

impl<N: DriverStream> Prepared<N> {
    pub(crate) fn put(&mut self, index: usize, ready: Ready<N>) {
        match self.few.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some((index, ready)),
            None => self.more.push((index, ready)),
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.few[0].is_none()
    }

    /// Takes everything out, and returns the driver's preparations of the operations from `first`
    /// on, by their indexes from there.
    pub(crate) fn rest_from(&mut self, first: usize) -> Vec<(usize, N::Preparation)> {
        let few = self.few.iter_mut().filter_map(Option::take);
        few.chain(self.more.drain(..))
            .filter_map(|(i, ready)| match ready {
                Ready::Driver(preparation) if i >= first => Some((i - first, preparation)),
                _ => None,
            })
            .collect()
    }

    #[inline]
    pub(crate) fn take(&mut self, index: usize) -> Ready<N> {
        for slot in &mut self.few {
            if slot.as_ref().is_some_and(|(i, _)| *i == index) {
                return slot.take().map_or(Ready::Plain, |s| s.1);
            }
        }
        match self.more.iter().position(|(i, _)| *i == index) {
            Some(at) => self.more.swap_remove(at).1,
            None => Ready::Plain,
        }
    }
}
