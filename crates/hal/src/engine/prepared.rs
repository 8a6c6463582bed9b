//! Preparations of a submission's operations, made before the stream's lock is taken.
//!
//! This module must not know what is prepared.

use crate::engine::driver::{DriverStream, Passed};
use leasehold_core::Error;

/// A wait that goes to the driver.
pub(crate) struct NativeWait<N: DriverStream> {
    pub(crate) mark: N::Mark,
    /// `None` for a stream of another library, of which nothing is to be learned: it has no
    /// failure, and its owner publishes its progress.
    pub(crate) passed: Option<Passed>,
}

/// The preparation of an operation that needs one.
pub(crate) enum Preparation<N: DriverStream> {
    /// The wait goes to the driver.
    Wait(NativeWait<N>),
    /// The driver's own preparation.
    Driver(N::Preparation),
}

/// Whether an operation can go to the driver.
pub(crate) enum Ready<N: DriverStream> {
    /// The operation can go now, with this preparation if it needs one.
    Now(Option<Preparation<N>>),
    /// The operation must wait for the host.
    Blocked,
    /// The timepoint that the operation waits for has failed.
    Failed(Error),
}

/// The preparations of a submission's operations, by index.
pub(crate) struct Prepared<N: DriverStream> {
    few: [Option<(usize, Preparation<N>)>; 4],
    more: Vec<(usize, Preparation<N>)>,
}

impl<N: DriverStream> Default for Prepared<N> {
    fn default() -> Self {
        Self { few: [const { None }; 4], more: Vec::new() }
    }
}

impl<N: DriverStream> Prepared<N> {
    pub(crate) fn put(&mut self, index: usize, preparation: Preparation<N>) {
        match self.few.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some((index, preparation)),
            None => self.more.push((index, preparation)),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.few[0].is_none()
    }

    /// Takes everything out, and returns the driver's preparations of the operations from `first`
    /// on, by their indexes from there.
    pub(crate) fn rest_from(&mut self, first: usize) -> Vec<(usize, N::Preparation)> {
        let few = self.few.iter_mut().filter_map(Option::take);
        few.chain(self.more.drain(..))
            .filter_map(|(i, preparation)| match preparation {
                Preparation::Driver(own) if i >= first => Some((i - first, own)),
                _ => None,
            })
            .collect()
    }

    pub(crate) fn take(&mut self, index: usize) -> Option<Preparation<N>> {
        for slot in &mut self.few {
            if slot.as_ref().is_some_and(|(i, _)| *i == index) {
                return slot.take().map(|(_, preparation)| preparation);
            }
        }
        let at = self.more.iter().position(|(i, _)| *i == index)?;
        Some(self.more.swap_remove(at).1)
    }
}
