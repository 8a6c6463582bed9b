//! The operators of a computation, counted.

use crate::parallel::Operation;

/// Equal operators of a computation: of one kernel and one shape.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperatorCount {
    /// The kernel's name; `all_reduce` or `all_gather` for what ranks exchange.
    pub name: &'static str,
    /// As [`Operator::shape`](leasehold_operators::Operator::shape) has it.
    pub shape: String,
    /// As [`Operator::computed_by`](leasehold_operators::Operator::computed_by) has it;
    /// `communicator` for what ranks exchange.
    pub computed_by: &'static str,
    /// The number of these operators.
    pub count: usize,
}

/// Adds operators, each of which a computation has `times` times. New ones follow in their order.
pub(crate) fn add<'a>(
    counts: &mut Vec<OperatorCount>,
    operators: impl IntoIterator<Item = &'a Operation>,
    times: usize,
) {
    for operator in operators {
        let (name, shape) = (operator.kernel_name(), operator.shape());
        let computed_by = operator.computed_by();
        let same = |c: &&mut OperatorCount| {
            (c.name, c.computed_by, &c.shape) == (name, computed_by, &shape)
        };
        match counts.iter_mut().find(same) {
            Some(found) => found.count += times,
            None => counts.push(OperatorCount { name, shape, computed_by, count: times }),
        }
    }
}
