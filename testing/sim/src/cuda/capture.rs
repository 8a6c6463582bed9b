//! Capture: recording a stream's work as nodes of a graph, and the calls that are forbidden
//! meanwhile.
//!
//! A capture belongs to the thread that began it. Another stream joins it by a wait for one of its
//! events, and must be joined back before it ends. A forbidden call breaks the capture: until it is
//! ended, every call on its streams fails.
//!
//! This module must not know how nodes run.

use super::tables::{Event, Graph, GraphNode, NodeKind, Stream, Tables};
use super::{Scope, refuse};
use crate::{Machine, Node, NodeId};
use leasehold_core::sync::thread::{self, ThreadId};
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::codes::code;
use leasehold_cuda::driver::ops::{CaptureMode, NativeEvent, NativeStream};
use std::collections::{BTreeMap, BTreeSet};

/// An active capture.
#[derive(Debug)]
pub(super) struct Capture {
    pub origin: u64,
    pub thread: ThreadId,
    /// Which threads it forbids calls to: its own, or all of them ([`CaptureMode::Global`]).
    pub mode: CaptureMode,
    /// The graph under construction.
    pub graph: u64,
    /// A forbidden call was made.
    pub broken: bool,
    /// For each stream of the capture, the predecessors of its next node.
    pub tips: BTreeMap<u64, Vec<NodeId>>,
    /// Each node's predecessors.
    pub after: BTreeMap<NodeId, Vec<NodeId>>,
}

impl Capture {
    /// Whether all work of the other streams comes before the last work of the origin.
    fn is_joined(&self) -> bool {
        let mut seen: BTreeSet<NodeId> = BTreeSet::new();
        let mut stack: Vec<NodeId> = self.tips.get(&self.origin).cloned().unwrap_or_default();
        while let Some(node) = stack.pop() {
            if seen.insert(node) {
                stack.extend(self.after.get(&node).into_iter().flatten());
            }
        }
        self.tips.values().flatten().all(|tip| seen.contains(tip))
    }
}

impl Tables {
    /// Finds a live stream of the current context. The handles 0 and 1 are the legacy default
    /// stream, and 2 is the default stream of the calling thread, once they were made.
    pub(super) fn stream(
        &self,
        api: &'static str,
        scope: Scope,
        stream: NativeStream,
    ) -> Result<(u64, Stream)> {
        let handle = match stream.0 {
            0 | 1 => self.special.get(&(scope.context, None)).copied(),
            2 => self.special.get(&(scope.context, Some(thread::current().id()))).copied(),
            handle => Some(handle),
        };
        let (handle, found) = handle
            .and_then(|handle| Some((handle, self.streams.get(&handle).copied()?)))
            .ok_or_else(|| refuse(api, code::INVALID_HANDLE))?;
        if found.context == scope.context {
            Ok((handle, found))
        } else {
            Err(refuse(api, code::INVALID_CONTEXT))
        }
    }

    /// Finds a live event of the current context.
    pub(super) fn event(
        &self,
        api: &'static str,
        scope: Scope,
        event: NativeEvent,
    ) -> Result<Event> {
        let found =
            self.events.get(&event.0).cloned().ok_or_else(|| refuse(api, code::INVALID_HANDLE))?;
        if found.context == scope.context {
            Ok(found)
        } else {
            Err(refuse(api, code::INVALID_CONTEXT))
        }
    }

    /// The capture that includes a stream.
    pub(super) fn capture_of(&self, stream: u64) -> Option<u64> {
        self.captures.iter().find(|(_, c)| c.tips.contains_key(&stream)).map(|(&id, _)| id)
    }

    /// Breaks the captures with a stream of a context, of all threads. Returns whether there are
    /// any.
    pub(super) fn break_captures(&mut self, context: u64) -> bool {
        let Self { captures, streams, .. } = self;
        let mut any = false;
        for capture in captures.values_mut() {
            let mut captured = capture.tips.keys().filter_map(|stream| streams.get(stream));
            if captured.any(|stream| stream.context == context) {
                capture.broken = true;
                any = true;
            }
        }
        any
    }

    /// Breaks a capture.
    pub(super) fn break_capture(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.broken = true;
        }
    }

    /// Refuses a call that a thread must not make while it captures, or while another thread has a
    /// global capture, and breaks the capture.
    pub(super) fn forbidden_in_capture(&mut self, api: &'static str) -> Result<()> {
        let me = thread::current().id();
        let mine = self.capture_modes.get(&me).copied().unwrap_or_default();
        if mine == CaptureMode::Relaxed {
            return Ok(());
        }
        let of_others = |c: &Capture| mine == CaptureMode::Global && c.mode == CaptureMode::Global;
        let mut any = false;
        for capture in self.captures.values_mut().filter(|c| c.thread == me || of_others(c)) {
            capture.broken = true;
            any = true;
        }
        if any { Err(refuse(api, code::STREAM_CAPTURE_UNSUPPORTED)) } else { Ok(()) }
    }

    /// Refuses a call that is forbidden for a captured stream, and breaks the capture.
    pub(super) fn forbidden_on_captured(&mut self, api: &'static str, stream: u64) -> Result<()> {
        let Some(capture) = self.capture_of(stream) else { return Ok(()) };
        self.break_capture(capture);
        Err(refuse(api, code::STREAM_CAPTURE_UNSUPPORTED))
    }

    /// Refuses a call on an event that is forbidden while the event's record is a captured one.
    pub(super) fn forbidden_on_captured_event(
        &mut self,
        api: &'static str,
        event: &Event,
    ) -> Result<()> {
        match &event.captured {
            Some((capture, _)) if self.captures.contains_key(capture) => {
                self.break_capture(*capture);
                Err(refuse(api, code::CAPTURED_EVENT))
            }
            // The capture is over: the event is invalid until it is recorded again.
            Some(_) => Err(refuse(api, code::INVALID_VALUE)),
            None => Ok(()),
        }
    }

    /// Appends a node for a stream of a capture.
    pub(super) fn capture_node(
        &mut self,
        machine: &Machine,
        api: &'static str,
        capture: u64,
        stream: u64,
        node: Node,
        kind: NodeKind,
    ) -> Result<()> {
        let found =
            self.captures.get_mut(&capture).ok_or_else(|| refuse(api, code::INVALID_HANDLE))?;
        if found.broken {
            return Err(refuse(api, code::STREAM_CAPTURE_INVALIDATED));
        }
        let tips = found.tips.get(&stream).cloned().unwrap_or_default();
        let graph = found.graph;
        let id = self.graph_node(machine, graph, node, kind, &tips)?.0;
        if let Some(found) = self.captures.get_mut(&capture) {
            found.tips.insert(stream, vec![id]);
            found.after.insert(id, tips);
        }
        Ok(())
    }

    /// Appends a node to a graph.
    pub(super) fn graph_node(
        &mut self,
        machine: &Machine,
        graph: u64,
        node: Node,
        kind: NodeKind,
        after: &[NodeId],
    ) -> Result<(NodeId, u64)> {
        let missing = || Error::NotFound("graph".into());
        let id = machine.graph_add(self.graphs.get(&graph).ok_or_else(missing)?.id, node, after)?;
        let handle = self.handle();
        let found = self.graphs.get_mut(&graph).ok_or_else(missing)?;
        found.nodes.insert(handle, GraphNode { id, kind });
        found.handles.insert(id, handle);
        Ok((id, handle))
    }

    /// Begins a capture.
    pub(super) fn capture_begin(
        &mut self,
        machine: &Machine,
        api: &'static str,
        stream: u64,
        mode: CaptureMode,
    ) -> Result<()> {
        if self.capture_of(stream).is_some() {
            return Err(refuse(api, code::ILLEGAL_STATE));
        }
        let id = machine.graph_create()?;
        let (graph, capture) = (self.handle(), self.handle());
        self.graphs.insert(graph, Graph::new(id));
        self.captures.insert(
            capture,
            Capture {
                origin: stream,
                thread: thread::current().id(),
                mode,
                graph,
                broken: false,
                tips: BTreeMap::from([(stream, Vec::new())]),
                after: BTreeMap::new(),
            },
        );
        Ok(())
    }

    /// Ends a capture, and returns its graph to the caller.
    pub(super) fn capture_end(
        &mut self,
        machine: &Machine,
        api: &'static str,
        stream: u64,
    ) -> Result<u64> {
        let id = self.capture_of(stream).ok_or_else(|| refuse(api, code::ILLEGAL_STATE))?;
        let Some(capture) = self.captures.get(&id) else {
            return Err(refuse(api, code::ILLEGAL_STATE));
        };
        if capture.origin != stream {
            self.break_capture(id);
            return Err(refuse(api, code::STREAM_CAPTURE_UNMATCHED));
        }
        // The capture is over from here on, even after a failure.
        let failure = if capture.thread != thread::current().id() {
            Some(code::STREAM_CAPTURE_WRONG_THREAD)
        } else if capture.broken {
            Some(code::STREAM_CAPTURE_INVALIDATED)
        } else if !capture.is_joined() {
            Some(code::STREAM_CAPTURE_UNJOINED)
        } else {
            None
        };
        let graph = capture.graph;
        self.captures.remove(&id);
        let Some(failure) = failure else { return Ok(graph) };
        if let Some(graph) = self.graphs.remove(&graph) {
            // The graph was made when the capture began, so this call cannot fail.
            let _ = machine.graph_destroy(graph.id);
        }
        Err(refuse(api, failure))
    }

    /// Handles the destruction of a stream: a capture ends with its origin. Nodes of a forked
    /// stream stay in the capture.
    pub(super) fn capture_leave(&mut self, machine: &Machine, stream: u64) {
        let Some(id) = self.capture_of(stream) else { return };
        let origin = self.captures.get(&id).is_some_and(|c| c.origin == stream);
        if origin
            && let Some(graph) =
                self.captures.remove(&id).and_then(|c| self.graphs.remove(&c.graph))
        {
            let _ = machine.graph_destroy(graph.id);
        }
    }

    /// Handles a wait for an event if a capture is involved. `None` if no capture is involved.
    pub(super) fn capture_wait(
        &mut self,
        api: &'static str,
        stream: u64,
        event: &Event,
        recorded: bool,
    ) -> Option<Result<()>> {
        let own = self.capture_of(stream);
        match (own, &event.captured) {
            (None, None) => None,
            // The event's capture is over, and the event was not recorded since.
            (_, Some((over, _))) if !self.captures.contains_key(over) => {
                Some(Err(refuse(api, code::INVALID_VALUE)))
            }
            (Some(own), None) => {
                // The event marks work outside of the capture.
                if !recorded {
                    return Some(Ok(()));
                }
                self.break_capture(own);
                Some(Err(refuse(api, code::STREAM_CAPTURE_ISOLATION)))
            }
            (Some(own), Some((other, _))) if own != *other => {
                self.break_capture(own);
                self.break_capture(*other);
                Some(Err(refuse(api, code::STREAM_CAPTURE_MERGE)))
            }
            (_, Some((capture, nodes))) => {
                let capture = self.captures.get_mut(capture)?;
                if capture.broken {
                    return Some(Err(refuse(api, code::STREAM_CAPTURE_INVALIDATED)));
                }
                let tips = capture.tips.entry(stream).or_default();
                tips.extend_from_slice(nodes);
                tips.sort_unstable();
                tips.dedup();
                Some(Ok(()))
            }
        }
    }
}
