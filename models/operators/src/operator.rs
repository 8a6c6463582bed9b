//! Operators: a checked kernel launch with leases on its memory.
//!
//! An operator is made once and can be executed any number of times, eagerly or recorded. Its
//! operands and its launch are fixed. The constructors in [`ops`](crate::ops) make operators from
//! shapes.

use crate::kernels::cpu::tile::{MAX_OPERANDS, Params};
use crate::library::{Library, Resolved};
use crate::part::BufferPart;
use leasehold::kernel::Grid;
use leasehold::{Error, GraphOperator, Operand, Result, Stream, View};
use std::fmt;

/// A checked kernel launch, with leases on all resources that it uses.
#[doc(alias = "GraphOperator")]
pub struct Operator {
    kernel: Resolved,
    parts: Vec<BufferPart>,
    params: Vec<u8>,
    /// The bytes that a launch passes: tensor maps, and then the parameters.
    launched: Vec<u8>,
    grid: Grid,
    /// Products of a vendor's library in the kernel's place.
    #[cfg(feature = "cuda")]
    products: Option<crate::gemm::Products>,
}

impl Operator {
    /// A launch of kernel `name`; `None` for operands that the parameters leave out.
    ///
    /// # Errors
    /// `NotFound` for an unknown kernel; `InvalidArgument` for parameters that the kernel refuses,
    /// another number of operands, or an operand that is too short.
    pub fn new(
        library: &Library,
        name: &str,
        params: &impl Params,
        operands: &[Option<BufferPart>],
    ) -> Result<Self> {
        let is_aligned = |i: u32| {
            let part = operands.get(i as usize).and_then(Option::as_ref);
            part.is_none_or(|part| part.view().addr().is_multiple_of(16))
        };
        let kernel = library.kernel_for(name, params.as_bytes(), is_aligned)?.clone();
        let spec = kernel.spec();
        let (launch, grid) = kernel.plan(params.as_bytes()).map_err(Error::InvalidArgument)?;
        if operands.len() != spec.operands.len() {
            return Err(Error::invalid(format!(
                "operator {name} takes {} operands, not {}; give None for one that its parameters leave out",
                spec.operands.len(),
                operands.len()
            )));
        }
        let mut parts = Vec::with_capacity(operands.len());
        let given = |i: usize| operands[i].as_ref().filter(|_| launch.bytes[i] > 0);
        let writes = |i: &usize| spec.operands[*i].access.writes();
        for i in 0..operands.len() {
            let part = match given(i) {
                Some(part) => part.clone(),
                // An operand that is left out brings no order with other launches. So in a role
                // that writes, it is no byte of another operand that this launch writes.
                None => match (0..operands.len()).filter(writes).find_map(given) {
                    Some(written) if writes(&i) => written.slice(0, 0)?,
                    _ => library.none().into(),
                },
            };
            let (offset, len) = (part.offset(), part.len());
            let aligned = offset.is_multiple_of(u64::from(launch.align[i].max(1)));
            if len < launch.bytes[i] || !aligned {
                return Err(Error::invalid(format!(
                    "operand {:?} of operator {name} needs {} bytes aligned to {}; {len} at byte {offset} of their buffer are given: take a larger part, from such a multiple on",
                    spec.operands[i].name, launch.bytes[i], launch.align[i]
                )));
            }
            parts.push(part);
        }
        Ok(Self {
            launched: kernel.launched(params.as_bytes()),
            kernel,
            parts,
            params: params.as_bytes().to_vec(),
            grid,
            #[cfg(feature = "cuda")]
            products: None,
        })
    }

    /// The operator with products of a vendor's library in the kernel's place, if the library
    /// computes them.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_products(mut self, products: Option<crate::gemm::Products>) -> Self {
        self.products = products;
        self
    }

    /// Returns whether the kernel takes its operands by tensor maps.
    #[cfg(feature = "cuda")]
    pub(crate) fn has_maps(&self) -> bool {
        !self.kernel.mapped().is_empty()
    }

    /// The kernel's name.
    #[must_use]
    pub fn kernel_name(&self) -> &'static str {
        self.kernel.spec().name
    }

    /// The name of the kernel's entry that computes the operator, or `cuBLASLt`. The shape, the
    /// element types and the device select it.
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime};
    /// use leasehold_operators::{DType, Library, Tensor, ops};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let library = Library::of(&runtime)?;
    /// let tensor = |rows, cols| Tensor::alloc(&runtime, DType::Bf16, rows, cols);
    /// let (x, weight, y) = (tensor(16, 32)?, tensor(64, 32)?, tensor(16, 64)?);
    /// let to = ops::Projection { weight: &weight, bias: None, y: &y };
    /// let product = ops::linear(&library, &x, None, to)?;
    /// // On a CUDA device with tensor cores: "linear_tiles".
    /// assert_eq!(product.computed_by(), "linear");
    /// assert_eq!(product.shape(), "m 16, k 32, n 64");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn computed_by(&self) -> &'static str {
        #[cfg(feature = "cuda")]
        if self.products.is_some() {
            return "cuBLASLt";
        }
        self.kernel.entry()
    }

    /// The operator's sizes, for people: `m` or `rows` rows, `k` and `n` columns, heads, positions.
    #[must_use]
    pub fn shape(&self) -> String {
        self.kernel.spec().shape(&self.params)
    }

    /// The number of tiles, or blocks, of a launch.
    #[must_use]
    pub fn tiles(&self) -> u64 {
        self.grid.blocks.iter().map(|&g| u64::from(g)).product()
    }

    #[inline]
    fn operand(&self, i: usize) -> Operand<'_> {
        self.parts[i].operand(self.kernel.spec().operands[i].access)
    }
}

impl GraphOperator for Operator {
    fn name(&self) -> &str {
        self.kernel.spec().name
    }

    fn accesses(&self) -> Vec<Operand<'_>> {
        let all = (0..self.parts.len()).map(|i| self.operand(i));
        #[cfg(feature = "cuda")]
        let all = all.chain(self.products.iter().flat_map(|p| p.own_operands()));
        all.collect()
    }

    #[inline]
    fn encode(&self, stream: &Stream) -> Result<()> {
        let n = self.parts.len();
        let mut operands = [self.operand(0); MAX_OPERANDS];
        for (i, to) in operands.iter_mut().enumerate().take(n).skip(1) {
            *to = self.operand(i);
        }
        #[cfg(feature = "cuda")]
        if let Some(products) = &self.products {
            return products.encode(stream, self.kernel.spec().name, &operands[..n]);
        }
        stream.launch(self.kernel.base(), &operands[..n], &self.launched[..], self.grid)
    }
}

impl fmt::Debug for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operator({}, {} tiles)", self.kernel.spec().name, self.tiles())
    }
}
