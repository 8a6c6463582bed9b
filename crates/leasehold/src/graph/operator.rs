//! Operators: work that is the same whether it runs at once or is recorded.

use crate::stream::Stream;
use crate::view::Operand;
use leasehold_core::Result;

/// Something that can be encoded: on a stream it runs at once, and on a stream of a recording it is
/// noted. Both share one path.
#[doc(alias = "graph::GraphOperator")]
pub trait GraphOperator {
    /// The name in reports.
    fn name(&self) -> &str;

    /// The operands that the operator reads and writes. In a recording, an operator that touches
    /// other memory (but for temporaries of its own) is refused.
    fn accesses(&self) -> Vec<Operand<'_>>;

    /// Puts its work on the stream. Must depend on nothing but its own state. Temporaries come from
    /// the stream's [runtime](Stream::runtime): in a recording they are packed with the graph's
    /// other temporaries. Otherwise their memory is free for reuse on the stream as soon as they
    /// are dropped.
    ///
    /// # Errors
    /// Any error of the operator; a recording then rolls back the operations that it encoded.
    fn encode(&self, stream: &Stream) -> Result<()>;
}
