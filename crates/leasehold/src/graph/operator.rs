//! Operators: work that is the same whether it runs at once or is recorded.

use crate::graph::Encoder;
use crate::runtime::Runtime;
use crate::stream::Stream;
use crate::view::Operand;
use leasehold_core::Result;

/// Something that can be encoded: eager execution is encode on a stream, recording is encode on the recorder, so both modes share
/// one path.
#[doc(alias = "graph::GraphOperator")]
pub trait GraphOperator {
    /// The name in reports.
    fn name(&self) -> &str;

    /// What it reads and writes. While recording, an operator that touches other memory (but for temporaries of its own) is refused.
    fn accesses(&self) -> Vec<Operand<'_>>;

    /// Puts its work into the encoder. Must depend on nothing but its own state.
    ///
    /// # Errors
    /// Whatever goes wrong; a recording then rolls back what was encoded.
    fn encode(&self, encoder: &mut Encoder<'_>) -> Result<()>;

    /// Runs it on a stream, or records it when the thread records.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    fn execute(&self, runtime: &Runtime, stream: &Stream) -> Result<()> {
        self.encode(&mut Encoder::new(runtime, stream))
    }
}
