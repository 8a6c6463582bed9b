//! Graphs in the model: what is recorded, what an update changes, what a launch does to buffers and
//! events.
//!
//! This module must not know threads.

use super::effect::{compute, part, sensible, whole};
use super::{Bound, Far, Graph, Model, Planned, TEMP};
use crate::kernels::Kernel;
use crate::step::{Hand, Node, Op, PINNED, Slot, Span, Step, TEMPS, Work, is_far, is_far_stream};

impl Model {
    pub(super) fn graph(&mut self, step: &Step, planned: &mut Planned) -> Option<()> {
        match *step {
            Step::Graph { slot, ref temps, ref nodes } => {
                self.graphs.get(usize::from(slot)).filter(|g| g.is_none())?;
                let graph = self.record(temps, nodes)?;
                for (b, _) in outside(&graph) {
                    self.bufs[b as usize].refs += 1;
                }
                for span in nodes.iter().flat_map(spans).filter(|s| s.slot < PINNED) {
                    self.shared.push(self.on_slot(span.slot));
                }
                self.shared.push(Self::on_stream(0));
                if graph.far {
                    self.shared.push(self.on_far());
                    self.far_kept = true;
                }
                self.exclusive.push(self.on_graph(slot));
                self.graphs[usize::from(slot)] = Some(graph);
            }
            Step::DropGraph(slot) => {
                let graph = self.graphs.get_mut(usize::from(slot))?.take()?;
                outside(&graph).iter().for_each(|u| self.release(u.0));
                self.exclusive.push(self.on_graph(slot));
            }
            Step::Launch { graph, stream } => self.launch(graph, stream, planned)?,
            Step::Params { graph, node, words } => {
                let g =
                    self.graphs.get_mut(usize::from(graph))?.as_mut().filter(|g| g.held == 0)?;
                match &mut g.nodes.get_mut(node as usize)?.node {
                    Node::Work(Work { op: Op::Launch { kernel, words: now }, .. })
                        if *kernel != Kernel::Gather =>
                    {
                        *now = words;
                    }
                    _ => return None,
                }
                self.exclusive.push(self.on_graph(graph));
            }
            Step::Grid { graph, node, blocks } => {
                let g =
                    self.graphs.get_mut(usize::from(graph))?.as_mut().filter(|g| g.held == 0)?;
                let bound = g.nodes.get_mut(node as usize)?;
                let Node::Work(Work { op: Op::Launch { .. }, .. }) = bound.node else {
                    return None;
                };
                // The contents of a temporary before its first write are undefined.
                bound.uses.last().filter(|to| **to & TEMP == 0)?;
                bound.blocks = Some(blocks);
                self.exclusive.push(self.on_graph(graph));
            }
            Step::Swap { graph, old, new } => {
                let (was, is) =
                    ((*self.slots.get(usize::from(old))?)?, (*self.slots.get(usize::from(new))?)?);
                if old >= PINNED
                    || new >= PINNED
                    || self.bufs[is as usize].raw
                    || is_far(old) != is_far(new)
                {
                    return None;
                }
                // Host calls of the graph copy from and to other backends' memory, where it was.
                if is_far(old) && !(self.shape.far == Far::Peer && self.far_open) {
                    return None;
                }
                let g = self.graphs.get(usize::from(graph))?.as_ref().filter(|g| g.held == 0)?;
                let used = outside(g);
                let longer =
                    self.bufs[is as usize].data.len() >= self.bufs[was as usize].data.len();
                if !longer || !used.iter().any(|u| u.0 == was) || used.iter().any(|u| u.0 == is) {
                    return None;
                }
                for b in self.graphs[usize::from(graph)]
                    .as_mut()?
                    .nodes
                    .iter_mut()
                    .flat_map(|n| &mut n.uses)
                {
                    *b = if *b == was { is } else { *b };
                }
                self.bufs[is as usize].refs += 1;
                self.release(was);
                self.exclusive.push(self.on_graph(graph));
                self.shared.push(self.on_slot(old));
                self.shared.push(self.on_slot(new));
                if is_far(old) {
                    self.shared.push(self.on_far());
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// The buffer or temporary of a part of a graph's work.
    fn place_of(&self, span: Span, temps: &[u32]) -> Option<u32> {
        if span.slot >= TEMPS {
            let t = usize::from(span.slot - TEMPS);
            let len = *temps.get(t)?;
            return (u64::from(span.at) + u64::from(span.len) <= u64::from(len))
                .then_some(t as u32 | TEMP);
        }
        let b = self.span(span).filter(|_| span.slot < PINNED)?;
        (!self.bufs[b as usize].raw).then_some(b)
    }

    pub(super) fn record(&mut self, temps: &[u32], nodes: &[Node]) -> Option<Graph> {
        let mut written = vec![false; temps.len()];
        let mut bound = Vec::with_capacity(nodes.len());
        let mut far = false;
        for node in nodes {
            let (mut uses, mut event) = (Vec::new(), 0);
            if let Node::Record(e) = node {
                event = self.events.get(usize::from(*e))?.as_ref()?.id;
                self.shared.push(self.on_event(*e));
            }
            let in_loop = matches!(node, Node::Loop { .. });
            for work in node.works() {
                let crosses = self.crosses(false, work)?;
                far |= crosses;
                let simple = matches!(
                    work.op,
                    Op::Fill { .. } | Op::Copy | Op::Copy2d { .. } | Op::Launch { .. }
                );
                if in_loop && (crosses || !simple) {
                    return None;
                }
                let first = uses.len();
                for &span in work.from.iter().chain([&work.to]) {
                    uses.push(self.place_of(span, temps)?);
                }
                let (from, to) = uses[first..].split_at(work.from.len());
                if from.iter().any(|&f| f & TEMP != 0 && !written[(f & !TEMP) as usize]) {
                    return None;
                }
                if to[0] & TEMP != 0 {
                    let t = (to[0] & !TEMP) as usize;
                    if !written[t] && (node.rounds() == 0 || !whole(work, temps[t])) {
                        return None;
                    }
                    written[t] = true;
                }
                sensible(work, from, to[0])?;
                if work.to.len == 0
                    || matches!(work.op, Op::Pinned | Op::Upload { hand: Hand::Synchronous, .. })
                {
                    return None;
                }
            }
            if let Node::Loop { rounds, branch, works } = node
                && (works.is_empty() || *branch && *rounds > 1)
            {
                return None;
            }
            bound.push(Bound { node: node.clone(), uses, event, blocks: None });
        }
        let held = self.stream(0)?;
        Some(Graph { nodes: bound, temps: temps.to_vec(), held, far })
    }

    fn launch(&mut self, slot: Slot, stream: Slot, planned: &mut Planned) -> Option<()> {
        let mut need = self.stream(stream).filter(|_| !is_far_stream(stream))?;
        let graph = self.graphs.get(usize::from(slot))?.as_ref()?;
        let used = outside(graph);
        need |= graph.held;
        for &(b, writes) in &used {
            let buf = &self.bufs[b as usize];
            need |= buf.held_write | if writes { buf.held_read } else { 0 };
        }
        let graph = self.graphs[usize::from(slot)].take()?;
        self.hold(stream, need);
        for &(b, writes) in &used {
            let buf = &mut self.bufs[b as usize];
            planned.reads.push(b);
            if writes {
                planned.writes.push((b, false));
                buf.held_write = need;
                self.exclusive.push(self.on_buffer(b));
            } else {
                buf.held_read |= need;
                self.shared.push(self.on_buffer(b));
            }
        }
        let mut temps: Vec<Vec<u8>> =
            graph.temps.iter().map(|&len| vec![0; len as usize]).collect();
        for Bound { node, uses, event, blocks } in &graph.nodes {
            match node {
                Node::Call => self.calls += 1,
                Node::Record(slot) => {
                    let on = self.on_event(*slot);
                    if let Some(Some(e)) = self.events.get_mut(usize::from(*slot))
                        && e.id == *event
                    {
                        (e.recorded, e.held) = (true, need);
                        self.exclusive.push(on);
                        planned.records.push(*slot);
                    } else {
                        // The event is gone. Before it went, the launch would be its last record.
                        self.shared.push(on);
                    }
                }
                Node::Work(_) | Node::Loop { .. } => {}
            }
            for _ in 0..node.rounds() {
                let mut uses = uses.iter();
                for work in node.works() {
                    let inputs: Vec<Vec<u8>> = std::iter::zip(&work.from, uses.by_ref())
                        .map(|(s, &u)| {
                            let data = if u & TEMP != 0 {
                                &temps[(u & !TEMP) as usize]
                            } else {
                                &self.bufs[u as usize].data
                            };
                            part(data, *s).to_vec()
                        })
                        .collect();
                    let Some(&to) = uses.next() else { break };
                    let data = if to & TEMP != 0 {
                        &mut temps[(to & !TEMP) as usize]
                    } else {
                        &mut self.bufs[to as usize].data
                    };
                    compute(work, *blocks, &inputs, data);
                }
            }
        }
        self.graphs[usize::from(slot)] = Some(Graph { held: need, ..graph });
        self.exclusive.push(self.on_graph(slot));
        Some(())
    }
}

/// The buffers that a graph uses, and whether it writes them.
pub(super) fn outside(graph: &Graph) -> Vec<(u32, bool)> {
    let mut all: Vec<(u32, bool)> = Vec::new();
    for Bound { node, uses, .. } in &graph.nodes {
        let places =
            node.works().iter().flat_map(|work| work.from.iter().map(|_| false).chain([true]));
        for (&b, writes) in std::iter::zip(uses, places).filter(|(b, _)| **b & TEMP == 0) {
            match all.iter_mut().find(|a| a.0 == b) {
                Some(a) => a.1 |= writes,
                None => all.push((b, writes)),
            }
        }
    }
    all
}

fn spans(node: &Node) -> impl Iterator<Item = Span> + '_ {
    node.works().iter().flat_map(|work| work.from.iter().chain([&work.to])).copied()
}
