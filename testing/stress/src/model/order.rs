//! The order of steps: the objects that order steps, and the steps that each step follows.

use super::{Model, SKEW, Track};
use crate::step::Slot;

impl Model {
    pub(super) fn on_stream(s: Slot) -> usize {
        usize::from(s)
    }
    pub(super) fn on_slot(&self, s: Slot) -> usize {
        self.streams.len() + usize::from(s)
    }
    pub(super) fn on_event(&self, s: Slot) -> usize {
        self.streams.len() + self.slots.len() + usize::from(s)
    }
    pub(super) fn on_host_timeline(&self, s: Slot) -> usize {
        self.on_event(0) + self.events.len() + usize::from(s)
    }
    pub(super) fn on_graph(&self, s: Slot) -> usize {
        self.on_host_timeline(0) + self.host_timelines.len() + usize::from(s)
    }
    /// Returns whether any stream is held.
    pub(super) fn on_holds(&self) -> usize {
        self.on_graph(0) + self.graphs.len()
    }
    /// Streams that fail on purpose.
    pub(super) fn on_scenes(&self) -> usize {
        self.on_holds() + 1
    }
    /// The other device's runtime.
    pub(super) fn on_far(&self) -> usize {
        self.on_scenes() + 1
    }
    pub(super) fn first_buffer(&self) -> usize {
        self.on_far() + 1
    }
    pub(super) fn on_buffer(&self, b: u32) -> usize {
        self.first_buffer() + b as usize
    }

    pub(super) fn order(&mut self, thread: u8, after: &mut Vec<(u8, u32)>) {
        let me = usize::from(thread);
        let index = self.counts[me];
        let mut need = |who: (u8, u32), known: &mut [u32]| {
            let (t, count) = (usize::from(who.0), who.1 + 1);
            if t != me && known[t] < count {
                known[t] = count;
                match after.iter_mut().find(|a| a.0 == who.0) {
                    Some(a) => a.1 = count,
                    None => after.push((who.0, count)),
                }
            }
        };
        let known = &mut self.known[me];
        let most = self
            .shared
            .iter()
            .chain(&self.commuting)
            .chain(&self.exclusive)
            .max()
            .map_or(0, |m| m + 1);
        if self.tracks.len() < most {
            self.tracks.resize(most, Track::default());
        }
        for &r in &self.exclusive {
            let track = &mut self.tracks[r];
            let Track { exclusive, shared, commuting } = track;
            exclusive
                .iter()
                .copied()
                .chain(shared.drain(..))
                .chain(commuting.drain(..))
                .for_each(|w| need(w, known));
            track.exclusive = Some((thread, index));
        }
        let together = self
            .shared
            .iter()
            .map(|r| (*r, true))
            .chain(self.commuting.iter().map(|r| (*r, false)));
        for (r, reads) in together {
            let track = &mut self.tracks[r];
            if track.exclusive == Some((thread, index)) {
                continue;
            }
            let Track { exclusive, shared, commuting } = track;
            let (mine, others) = if reads { (shared, commuting) } else { (commuting, shared) };
            exclusive.iter().chain(others.iter()).for_each(|w| need(*w, known));
            match mine.iter_mut().find(|s| s.0 == thread) {
                Some(s) => s.1 = index,
                None => mine.push((thread, index)),
            }
        }
        // No thread runs far ahead of another.
        if self.steps.is_multiple_of(SKEW) {
            self.floor = std::mem::replace(&mut self.last, self.counts.clone());
        }
        self.steps += 1;
        for (t, &count) in self.floor.iter().enumerate().filter(|(_, count)| **count > 0) {
            need((t as u8, count - 1), known);
        }
        self.counts[me] += 1;
    }
}
