//! Tensor maps: how the boxes of a tensor lie in a binding, for kernels that copy whole boxes.
//!
//! This module must not know a driver's form of a map.

use super::LaunchInfo;
use bytemuck::{CheckedBitPattern, Pod, Zeroable};
use leasehold_core::{Error, Result};
use std::fmt;

/// The type of a tensor map's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, CheckedBitPattern)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say it")]
pub enum MapElement {
    U8 = 0,
    U16 = 1,
    U32 = 2,
    I32 = 3,
    U64 = 4,
    I64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
    /// CUDA's `FLOAT32_FTZ`.
    F32Ftz = 10,
    /// `f32` that is rounded to `tf32`.
    Tf32 = 11,
    /// CUDA's `TFLOAT32_FTZ`.
    Tf32Ftz = 12,
}

impl MapElement {
    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 | Self::F32Ftz | Self::Tf32 | Self::Tf32Ftz => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Returns whether it is a floating-point number.
    #[must_use]
    pub const fn is_float(self) -> bool {
        self as u8 >= Self::F16 as u8
    }
}

/// The order of a box's pieces of 16 bytes in shared memory, which keeps threads that read a column
/// from meeting in one bank. The number is the bytes of the inner dimension within which pieces
/// change places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Swizzle {
    #[default]
    None = 0,
    B32 = 1,
    B64 = 2,
    B128 = 3,
}

/// The layout of a tensor whose channels are stored in slices, which dimension 0 counts. A box has
/// one element of the last dimension but one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Interleave {
    /// No slices.
    #[default]
    None = 0,
    /// Slices of 16 bytes: `NC/8HWC8` for elements of two bytes.
    B16 = 1,
    /// Slices of 32 bytes: `NC/16HWC16` for elements of two bytes.
    B32 = 2,
}

/// A description of how a tensor of one to five dimensions lies in a binding, and of the box that
/// one instruction of a kernel copies. Dimension 0 is the innermost.
///
/// It is plain data of 128 bytes, and a part of a launch's parameters. A kernel says where
/// ([`KernelDesc::maps`](super::KernelDesc::maps)). On CUDA a launch replaces these bytes by the
/// driver's `CUtensorMap` of the operand, from compute capability 9.0 on. A launch, a graph and an
/// update make it for the address that the operand has then. Other backends pass the description
/// itself.
///
/// ```
/// use leasehold_hal::{MapElement, Swizzle, TensorMap};
/// // 1,000 rows of 512 numbers; boxes of 128 rows and 64 columns.
/// let map = TensorMap::new(MapElement::Bf16, &[512, 1000], &[64, 128]).swizzle(Swizzle::B128);
/// map.validate().unwrap();
/// assert_eq!(map.bytes(), 512 * 1000 * 2);
/// ```
///
/// NVIDIA: [`cuTensorMapEncodeTiled`][page].
///
/// [page]: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html
#[doc(alias("CUtensorMap", "cuTensorMapEncodeTiled", "TMA"))]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TensorMap {
    // Words of four bytes, so that parameters with a map have no padding.
    sizes: [[u32; 2]; 5],
    strides: [[u32; 2]; 4],
    boxes: [u32; 5],
    steps: [u32; 5],
    element: u8,
    rank: u8,
    interleave: u8,
    swizzle: u8,
    l2: u8,
    nan: u8,
    reserved: [u8; 10],
}

const _: () = assert!(size_of::<TensorMap>() == TensorMap::BYTES as usize);

const fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

const fn whole([low, high]: [u32; 2]) -> u64 {
    low as u64 | (high as u64) << 32
}

impl TensorMap {
    /// Bytes of a map.
    pub const BYTES: u32 = 128;
    /// The alignment of a map in the arguments of a kernel.
    pub const ALIGNMENT: u32 = 64;

    /// A tensor without gaps, of as many elements in each dimension, and its box. Elements out of
    /// bounds read as zero. A number of dimensions that is not the box's, or is not 1 to 5, is
    /// found by [`validate`](Self::validate).
    #[must_use]
    pub fn new(element: MapElement, sizes: &[u64], boxes: &[u32]) -> Self {
        let mut map = Self::zeroed();
        map.element = element as u8;
        map.rank = if sizes.len() == boxes.len() { sizes.len().min(6) as u8 } else { 0 };
        let mut stride = u64::from(element.bytes());
        for (i, (&size, &of)) in std::iter::zip(sizes, boxes).take(5).enumerate() {
            map.sizes[i] = halves(size);
            map.boxes[i] = of;
            map.steps[i] = 1;
            stride = stride.saturating_mul(size);
            if i < 4 && i + 1 < sizes.len() {
                map.strides[i] = halves(stride);
            }
        }
        map
    }

    /// Sets the bytes from an element to the next one in each dimension but the first.
    #[must_use]
    pub fn strides(mut self, bytes: &[u64]) -> Self {
        if bytes.len() + 1 == usize::from(self.rank) {
            for (to, &stride) in std::iter::zip(&mut self.strides, bytes) {
                *to = halves(stride);
            }
        } else {
            self.rank = 0;
        }
        self
    }

    /// Sets the number of elements from one that a box takes to the next one, in each dimension.
    #[must_use]
    pub fn steps(mut self, steps: &[u32]) -> Self {
        if steps.len() == usize::from(self.rank) {
            self.steps[..steps.len()].copy_from_slice(steps);
        } else {
            self.rank = 0;
        }
        self
    }

    /// Sets the order of a box's pieces in shared memory.
    #[must_use]
    pub fn swizzle(mut self, swizzle: Swizzle) -> Self {
        self.swizzle = swizzle as u8;
        self
    }

    /// Sets the layout of channels.
    #[must_use]
    pub fn interleave(mut self, interleave: Interleave) -> Self {
        self.interleave = interleave as u8;
        self
    }

    /// Sets the bytes that a read brings into the L2 cache at least: 0, 64, 128 or 256. Another
    /// number is found by [`validate`](Self::validate).
    #[must_use]
    pub fn l2_promotion(mut self, bytes: u32) -> Self {
        self.l2 = match bytes {
            0 => 0,
            64 => 1,
            128 => 2,
            256 => 3,
            _ => u8::MAX,
        };
        self
    }

    /// Fills elements out of bounds by not-a-number in place of zero.
    #[must_use]
    pub fn fill_nan(mut self) -> Self {
        self.nan = 1;
        self
    }

    /// The map at `offset` of a launch's parameters.
    ///
    /// # Panics
    /// If the parameters end before the map does.
    #[must_use]
    pub fn from_params(params: &[u8], offset: u32) -> Self {
        bytemuck::pod_read_unaligned(&params[offset as usize..][..Self::BYTES as usize])
    }

    /// The element's type; `None` for a number that is none.
    #[must_use]
    pub fn element(&self) -> Option<MapElement> {
        bytemuck::checked::try_cast(self.element).ok()
    }

    /// The number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// Elements of dimension `i`; 0 beyond the fifth one, here and below.
    #[must_use]
    pub fn size(&self, i: usize) -> u64 {
        self.sizes.get(i).map_or(0, |&size| whole(size))
    }

    /// Bytes from an element to the next one in dimension `i`; the element's bytes for dimension 0.
    #[must_use]
    pub fn stride(&self, i: usize) -> u64 {
        match i {
            0 => self.element().map_or(0, |e| e.bytes().into()),
            i => self.strides.get(i - 1).map_or(0, |&stride| whole(stride)),
        }
    }

    /// Elements of the box in dimension `i`, before [steps](Self::step_of).
    #[must_use]
    pub fn box_of(&self, i: usize) -> u32 {
        self.boxes.get(i).copied().unwrap_or(0)
    }

    /// The step of dimension `i`.
    #[must_use]
    pub fn step_of(&self, i: usize) -> u32 {
        self.steps.get(i).copied().unwrap_or(0)
    }

    /// The numbers of NVIDIA's enumerations: interleave, swizzle, L2 promotion, fill.
    #[must_use]
    pub fn modes(&self) -> [u8; 4] {
        [self.interleave, self.swizzle, self.l2, self.nan]
    }

    /// Bytes of a unit of the first dimension: an element, or a slice of an interleaved tensor.
    fn unit(&self) -> u64 {
        if self.interleave == 0 { self.stride(0) } else { 8 << self.interleave.min(2) }
    }

    /// Bytes from the tensor's first to its last one; `u64::MAX` for more than a number can count.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (0..self.rank().min(5)).fold(u64::from(self.stride(0) != 0), |end, i| {
            let stride = if i == 0 { self.unit() } else { self.stride(i) };
            // The first dimension's last element has all of its bytes.
            let last = self.size(i).saturating_sub(1).saturating_mul(stride);
            let own = if i == 0 { stride.saturating_sub(1) } else { 0 };
            end.saturating_add(last).saturating_add(own)
        })
    }

    /// Bytes to which the operand's address must be aligned.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        if self.interleave == Interleave::B32 as u8 { 32 } else { 16 }
    }

    /// Checks the rules that do not depend on an operand.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the parameter of `cuTensorMapEncodeTiled` and its rule.
    pub fn validate(&self) -> Result<()> {
        rules(self).map_err(|rule| Error::invalid(format!("{self:?} is no tensor map: {rule}")))
    }

    /// Checks the map for the operand of binding `i` of a launch.
    ///
    /// # Errors
    /// `InvalidArgument` for a map that is none, for a tensor that ends behind the operand, and for
    /// a misaligned operand.
    pub fn validate_for(&self, launch: &LaunchInfo<'_>, i: usize) -> Result<()> {
        self.validate()?;
        let (bytes, len) = (self.bytes(), launch.len(i));
        if bytes > len {
            return Err(Error::invalid(format!(
                "{self:?} takes {bytes} bytes, and binding {i} has {len}; give a longer operand, or sizes and strides that lie in it"
            )));
        }
        if !launch.is_aligned(i, self.alignment()) {
            return Err(Error::invalid(format!(
                "a tensor map needs its operand aligned to {} bytes (globalAddress), and binding {i} is not; begin the operand there",
                self.alignment()
            )));
        }
        Ok(())
    }
}

/// The most bytes of a box: the shared memory that a block can have.
const BOX_BYTES: u32 = 227 << 10;

/// The rule that a map breaks. The rules are those that the driver was seen to have on a device.
/// Exceptions: the driver accepts sizes above 2^31, and boxes that fit into no shared memory.
fn rules(map: &TensorMap) -> Result<(), String> {
    let Some(element) = map.element() else {
        return Err(format!("{} is no type of elements (tensorDataType)", map.element));
    };
    let rank = map.rank();
    let [interleave, swizzle, l2, nan] = map.modes();
    if !(1..=5).contains(&rank) {
        return Err("sizes, box, strides and steps have the same 1 to 5 dimensions, strides one less (tensorRank)".into());
    }
    if interleave > 2 || swizzle > 3 || l2 > 3 || nan > 1 || map.reserved != [0; 10] {
        return Err("interleave, swizzle, L2 promotion and fill are one of their names, and reserved bytes are 0".into());
    }
    if interleave != 0 && rank < 3 {
        return Err("an interleaved tensor has 3 dimensions or more (tensorRank)".into());
    }
    let unit = map.alignment();
    for i in 0..rank {
        // The driver takes 2^32. A copy by such a map ended a kernel on an H200.
        if !(1..=1 << 31).contains(&map.size(i)) {
            return Err(format!(
                "size {i} is 1 to 2^31, beyond which a device copies no box (globalDim)"
            ));
        }
        if i > 0 && (!map.stride(i).is_multiple_of(unit) || map.stride(i) >= 1 << 40) {
            return Err(format!(
                "stride {} is a multiple of {unit} below 2^40 (globalStrides)",
                i - 1
            ));
        }
        if !(1..=256).contains(&map.box_of(i)) {
            return Err(format!("box {i} is 1 to 256 (boxDim)"));
        }
        if !(1..=8).contains(&map.step_of(i)) {
            return Err(format!("step {i} is 1 to 8 (elementStrides)"));
        }
    }
    let inner = map.box_of(0) * element.bytes();
    if !inner.is_multiple_of(16) {
        return Err(format!(
            "the box's inner dimension has {inner} bytes, no multiple of 16 (boxDim)"
        ));
    }
    if interleave == 0 && swizzle != 0 && inner > 16 << swizzle {
        return Err(format!(
            "the box's inner dimension has {inner} bytes, and the swizzle takes {} at most (boxDim, swizzle)",
            16 << swizzle
        ));
    }
    let elements = |i: usize| u64::from(map.box_of(i).div_ceil(map.step_of(i)));
    let listed = u64::from(element.bytes()) * (0..rank).map(elements).product::<u64>();
    // A box of an interleaved tensor has one of the slices that dimension counts.
    let copied = map.unit() * (0..rank).filter(|i| i + 2 != rank).map(elements).product::<u64>();
    let bytes = listed.max(copied);
    if bytes > u64::from(BOX_BYTES) {
        return Err(format!(
            "a box has {bytes} bytes, and the shared memory of a block {BOX_BYTES} at most (boxDim)"
        ));
    }
    if nan != 0 && !element.is_float() {
        return Err("only floating-point numbers can be filled by not-a-number (oobFill)".into());
    }
    Ok(())
}

impl fmt::Debug for TensorMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.rank().min(5);
        let sizes: Vec<u64> = (0..rank).map(|i| self.size(i)).collect();
        let strides: Vec<u64> = (1..rank).map(|i| self.stride(i)).collect();
        write!(
            f,
            "TensorMap({:?} {sizes:?}, strides {strides:?}, box {:?}",
            self.element(),
            &self.boxes[..rank]
        )?;
        if self.steps[..rank].iter().any(|&s| s != 1) {
            write!(f, ", steps {:?}", &self.steps[..rank])?;
        }
        write!(f, ")")
    }
}

#[cfg(test)]
#[path = "../../tests/unit/tensor_map.rs"]
mod tests;
