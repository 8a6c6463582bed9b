//! Vector clocks. An agent is the host (0) or a queue; an epoch is a step of an agent.
//!
//! This module must not know what agents do.

/// The last known epoch of each agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    /// The last known epoch of `agent`.
    #[inline]
    pub(crate) fn get(&self, agent: u32) -> u64 {
        self.0.get(agent as usize).copied().unwrap_or(0)
    }

    /// Returns whether an agent's epoch is known.
    #[inline]
    pub(crate) fn knows(&self, agent: u32, epoch: u64) -> bool {
        self.get(agent) >= epoch
    }

    /// Sets an agent's own epoch.
    pub(crate) fn set(&mut self, agent: u32, epoch: u64) {
        let at = agent as usize;
        if self.0.len() <= at {
            self.0.resize(at + 1, 0);
        }
        self.0[at] = epoch;
    }

    /// Takes over all epochs that `other` knows.
    pub(crate) fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a = (*a).max(*b));
    }

    /// Removes epochs that `other` does not know.
    pub(crate) fn meet(&mut self, other: &Clock) {
        self.0.truncate(other.0.len());
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a = (*a).min(*b));
    }
}
