//! Graphs: templates that are built node by node, and executable graphs.
//!
//! Instantiation turns a template into a flat list. The nodes of a child graph take the child's
//! place: its first nodes wait for the child's dependencies, and the child's successors wait for
//! its last nodes. An update changes an executable graph for later launches only, because a launch
//! holds the list of its time.
//!
//! This module must not know queues.

use super::comm::Meet;
use super::command::{ExecNode, FillCall, KernelCall, NodeAction, NodeFn, Running, Transfer};
use super::conditional::{Condition, Part, Round};
use super::detect::Ancestors;
use super::ids::{CommId, EventId, GraphId, missing};
use super::kernel::Kernel;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result, Text};
use leasehold_hal::ConditionalKind;
use std::collections::BTreeMap;
use std::fmt;

/// Names a node of a template, and the same node of graphs made from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// A node of a graph.
#[derive(Clone)]
#[non_exhaustive]
pub enum Node {
    /// A kernel.
    Kernel(KernelCall),
    /// A copy.
    Copy(Transfer),
    /// A fill.
    Fill(FillCall),
    /// A host function.
    Host {
        /// The name in reports.
        name: Text,
        /// The function.
        call: Arc<NodeFn>,
    },
    /// Records an event.
    Record(EventId),
    /// Waits for the event's last record before the launch.
    WaitEvent(EventId),
    /// Writes a 64-bit word.
    WriteValue {
        /// The address.
        addr: u64,
        /// The value.
        value: u64,
    },
    /// Waits until a 64-bit word is at least a value.
    WaitValue {
        /// The address.
        addr: u64,
        /// The least value.
        value: u64,
    },
    /// Meets the calls of other ranks of a communicator, at each launch.
    Meet(Meet),
    /// Another graph, in its present state.
    Child(GraphId),
    /// Another graph, as often as a word says. It belongs to this one from now on, and ends with
    /// it. Its nodes are those that it has when an executable graph is made: none of a host, of
    /// events, of meetings, or that wait for a word.
    Conditional {
        /// The kind, which says how often the body runs.
        kind: ConditionalKind,
        /// The name in reports.
        name: Text,
        /// The word that is tested before each run of the body.
        condition: Condition,
        /// The graph that is the body.
        body: GraphId,
    },
    /// Does nothing.
    Empty,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::Kernel(k) => write!(f, "Kernel({})", k.kernel.name),
            Node::Copy(c) => c.fmt(f),
            Node::Fill(c) => c.fmt(f),
            Node::Host { name, .. } => write!(f, "Host({name})"),
            Node::Record(e) => write!(f, "Record({e:?})"),
            Node::WaitEvent(e) => write!(f, "WaitEvent({e:?})"),
            Node::WriteValue { addr, value } => write!(f, "WriteValue({addr:#x}, {value})"),
            Node::WaitValue { addr, value } => write!(f, "WaitValue({addr:#x}, {value})"),
            Node::Meet(m) => m.fmt(f),
            Node::Child(g) => write!(f, "Child({g:?})"),
            Node::Conditional { name, body, .. } => write!(f, "Conditional({name}, {body:?})"),
            Node::Empty => f.write_str("Empty"),
        }
    }
}

/// New parameters of a node, of its own kind.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum NodeUpdate {
    /// For a kernel node. The kernel itself may change.
    Kernel(KernelCall),
    /// For a copy node.
    Copy(Transfer),
    /// For a fill node.
    Fill(FillCall),
    /// Another event for a node that records or waits.
    Event(EventId),
}

/// The content of a template's node.
#[derive(Clone)]
pub(crate) enum TemplateNode {
    Action(NodeAction),
    Child(Arc<Flat>),
    Conditional(Arc<Part>, GraphId),
}

/// A template.
#[derive(Default)]
pub(crate) struct Template {
    parts: Vec<(TemplateNode, Vec<u32>)>,
}

/// A template as one list, in topological order.
#[derive(Default)]
pub(crate) struct Flat {
    actions: Vec<(NodeAction, u32)>,
    pred: Vec<Vec<u32>>,
    /// The position of each node of the template; `None` for a child graph.
    place: Vec<Option<u32>>,
}

impl Template {
    /// The number of nodes.
    pub(crate) fn len(&self) -> usize {
        self.parts.len()
    }

    /// Appends a node; `bound` is the content of a [`Node::Child`], a [`Node::Conditional`] or a
    /// [`Node::Meet`].
    ///
    /// # Errors
    /// `InvalidArgument` for a dependency that does not exist, or for invalid parameters.
    pub(crate) fn add(
        &mut self,
        node: Node,
        deps: &[NodeId],
        bound: Option<TemplateNode>,
    ) -> Result<NodeId> {
        let id = self.parts.len() as u32;
        if let Some(bad) = deps.iter().find(|d| d.0 >= id) {
            return Err(Error::invalid(format!("{bad:?} is no earlier node of the graph")));
        }
        let part = TemplateNode::Action(match node {
            Node::Kernel(k) => {
                k.check()?;
                NodeAction::Kernel(k)
            }
            Node::Copy(c) => {
                c.check()?;
                NodeAction::Copy(c)
            }
            Node::Fill(c) => {
                c.check()?;
                NodeAction::Fill(c)
            }
            Node::Host { name, call } => NodeAction::Host { name: (&*name).into(), call },
            Node::Record(e) => NodeAction::Record(e),
            Node::WaitEvent(e) => NodeAction::Wait(e),
            Node::WriteValue { addr, value } => NodeAction::WriteValue { addr, value },
            Node::WaitValue { addr, value } => NodeAction::WaitValue { addr, value },
            Node::Meet(_) | Node::Child(_) | Node::Conditional { .. } | Node::Empty => {
                NodeAction::Empty
            }
        });
        self.parts.push((bound.unwrap_or(part), deps.iter().map(|d| d.0).collect()));
        Ok(NodeId(id))
    }

    /// The bodies of its nodes.
    pub(super) fn bodies(&self) -> impl Iterator<Item = GraphId> {
        self.parts.iter().filter_map(|(part, _)| match part {
            TemplateNode::Conditional(_, body) => Some(*body),
            _ => None,
        })
    }

    /// The template as one list. Bodies are among `graphs`.
    ///
    /// # Errors
    /// `NotFound` for a body that is not there; `Unsupported` for nodes of a body that cannot run
    /// more than once in a launch.
    pub(super) fn flat(&self, graphs: &BTreeMap<GraphId, Template>) -> Result<Flat> {
        let mut flat = Flat::default();
        // For each part: the nodes that a successor of the part must wait for.
        let mut ends: Vec<Vec<u32>> = Vec::new();
        for (at, (part, deps)) in self.parts.iter().enumerate() {
            let mut before: Vec<u32> =
                deps.iter().flat_map(|&d| ends[d as usize].iter().copied()).collect();
            before.sort_unstable();
            before.dedup();
            ends.push(match part {
                TemplateNode::Action(action) => vec![flat.push(action.clone(), at, before)],
                TemplateNode::Child(child) => flat.append(child, at, before),
                TemplateNode::Conditional(part, body) => {
                    let body = graphs.get(body).ok_or_else(|| missing(*body))?.flat(graphs)?;
                    body.actions.iter().try_for_each(|(action, _)| check_body(action))?;
                    let head = flat.push(NodeAction::Head(part.clone()), at, before);
                    let last = flat.append(&body, at, vec![head]);
                    vec![flat.push(NodeAction::End(part.clone()), at, last)]
                }
            });
            // A child may be empty, also the first one.
            let is_action = matches!(part, TemplateNode::Action(_));
            flat.place.push(is_action.then(|| flat.actions.len() as u32 - 1));
        }
        Ok(flat)
    }
}

/// Checks that an action can run more than once in a launch.
///
/// # Errors
/// `Unsupported` for one that cannot.
fn check_body(action: &NodeAction) -> Result<()> {
    match action {
        NodeAction::Host { .. }
        | NodeAction::Record(_)
        | NodeAction::Wait(_)
        | NodeAction::WaitValue { .. }
        | NodeAction::Meet(_) => Err(Error::Unsupported(
            "host functions, events, waits and meetings cannot be nodes of a conditional body"
                .into(),
        )),
        _ => Ok(()),
    }
}

/// The parts of a list of nodes: a head and an end enclose each. Inner ones come first.
fn parts_of<'a>(actions: impl Iterator<Item = &'a NodeAction>) -> Vec<Round> {
    let (mut open, mut all) = (Vec::new(), Vec::new());
    for (node, action) in actions.enumerate() {
        match action {
            NodeAction::Head(_) => open.push(node as u32),
            NodeAction::End(_) => all.extend(open.pop().map(|head| Round::new(head, node as u32))),
            _ => {}
        }
    }
    all
}

/// An executable graph.
pub(crate) struct Exec {
    nodes: Arc<Vec<ExecNode>>,
    edges: Arc<Ancestors>,
    place: Vec<Option<u32>>,
    /// The parts under conditions.
    parts: Vec<Round>,
    /// The ranks whose calls the nodes make.
    comms: Vec<CommId>,
    /// The device whose memory the nodes take, and how much they take.
    pub(super) memory: (u32, u64),
}

impl Flat {
    /// Appends a node, and returns its number.
    fn push(&mut self, action: NodeAction, label: usize, pred: Vec<u32>) -> u32 {
        self.actions.push((action, label as u32));
        self.pred.push(pred);
        self.actions.len() as u32 - 1
    }

    /// Appends a graph that comes after `before`, and returns its last nodes.
    fn append(&mut self, child: &Flat, label: usize, before: Vec<u32>) -> Vec<u32> {
        let base = self.actions.len() as u32;
        let mut last: Vec<bool> = vec![true; child.actions.len()];
        for (i, (action, _)) in child.actions.iter().enumerate() {
            child.pred[i].iter().for_each(|&p| last[p as usize] = false);
            let pred = if child.pred[i].is_empty() {
                before.clone()
            } else {
                child.pred[i].iter().map(|p| p + base).collect()
            };
            self.push(action.clone(), label, pred);
        }
        if child.actions.is_empty() {
            return before;
        }
        (0..last.len()).filter(|&i| last[i]).map(|i| i as u32 + base).collect()
    }

    /// The number of nodes.
    pub(super) fn len(&self) -> usize {
        self.actions.len()
    }
}

impl Exec {
    /// The ranks whose calls a launch makes.
    pub(super) fn comms(&self) -> &[CommId] {
        &self.comms
    }

    /// Whether a node runs this kernel.
    pub(crate) fn runs(&self, kernel: &Arc<Kernel>) -> bool {
        self.nodes.iter().any(|node| node.action.runs(kernel))
    }

    pub(crate) fn new(flat: Flat, memory: (u32, u64)) -> Self {
        let mut next: Vec<Vec<u32>> = vec![Vec::new(); flat.actions.len()];
        for (node, pred) in flat.pred.iter().enumerate() {
            pred.iter().for_each(|&p| next[p as usize].push(node as u32));
        }
        let comm = |(action, _): &(NodeAction, u32)| match action {
            NodeAction::Meet(meet) => Some(meet.comm),
            _ => None,
        };
        let mut comms: Vec<CommId> = flat.actions.iter().filter_map(comm).collect();
        comms.sort_unstable();
        comms.dedup();
        let mut begins: Vec<u32> = Vec::with_capacity(flat.actions.len());
        for (node, (action, _)) in flat.actions.iter().enumerate() {
            let dependent = matches!(action, NodeAction::Kernel(call) if call.dependent);
            begins.push(match flat.pred[node][..] {
                [before] if dependent => begins[before as usize],
                _ => node as u32,
            });
        }
        let parts = parts_of(flat.actions.iter().map(|(action, _)| action));
        let nodes = flat.actions.into_iter().zip(next).zip(begins);
        let nodes = nodes
            .map(|(((action, label), next), begins)| {
                let next = next.into();
                ExecNode { action, next, label, begins }
            })
            .collect();
        Self {
            nodes: Arc::new(nodes),
            edges: Arc::new(Ancestors::new(flat.pred)),
            place: flat.place,
            parts,
            comms,
            memory,
        }
    }

    /// The number of nodes that a launch runs, including those of child graphs.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// A launch of the graph in its present state, without marks.
    pub(crate) fn launch(&self, launch: u64) -> Running {
        let waits: Vec<u32> = self.edges.pred.iter().map(|p| p.len() as u32).collect();
        let ready = (0..waits.len() as u32).filter(|&i| waits[i as usize] == 0).collect();
        Running {
            launch,
            nodes: self.nodes.clone(),
            edges: self.edges.clone(),
            left: waits.len(),
            waits,
            ready,
            parts: self.parts.clone(),
            tick: 0,
            marks: Vec::new(),
        }
    }

    /// Updates nodes for later launches, all of them or none.
    ///
    /// # Errors
    /// `InvalidArgument` for a node that does not exist or has another kind.
    pub(crate) fn update(&mut self, updates: &[(NodeId, NodeUpdate)]) -> Result<()> {
        let mut new = Vec::with_capacity(updates.len());
        for (node, update) in updates {
            let place = self.place.get(node.0 as usize).copied().flatten();
            let place = place.ok_or_else(|| {
                Error::invalid(format!("{node:?} is no node that can be changed"))
            })?;
            let action = match (&self.nodes[place as usize].action, update) {
                (NodeAction::Kernel(old), NodeUpdate::Kernel(k)) => {
                    k.check()?;
                    // These stay those of the node.
                    let &KernelCall { dependent, partition, cluster, cooperative, .. } = old;
                    NodeAction::Kernel(KernelCall {
                        dependent,
                        partition,
                        cluster,
                        cooperative,
                        ..k.clone()
                    })
                }
                (NodeAction::Copy(_), NodeUpdate::Copy(c)) => {
                    c.check()?;
                    NodeAction::Copy(*c)
                }
                (NodeAction::Fill(_), NodeUpdate::Fill(c)) => {
                    c.check()?;
                    NodeAction::Fill(*c)
                }
                (NodeAction::Record(_), NodeUpdate::Event(e)) => NodeAction::Record(*e),
                (NodeAction::Wait(_), NodeUpdate::Event(e)) => NodeAction::Wait(*e),
                (_, update) => {
                    return Err(Error::invalid(format!(
                        "{node:?} is of another kind than {update:?}"
                    )));
                }
            };
            new.push((place, action));
        }
        let nodes = Arc::make_mut(&mut self.nodes);
        new.into_iter().for_each(|(place, action)| nodes[place as usize].action = action);
        Ok(())
    }
}
