//! Machine code of CUDA modules.
//!
//! This module must not know a driver.

use std::borrow::Cow;
use std::fmt;

/// The machine code of a CUDA module (a cubin) for the devices of one compute capability, and for
/// those of later ones with the same major number.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Cubin<'a> {
    compute_capability: (u32, u32),
    image: Cow<'a, [u8]>,
}

impl<'a> Cubin<'a> {
    /// The machine code `image` for devices from `compute_capability` on.
    ///
    /// # Safety
    /// - `image` is a whole cubin, as NVIDIA's compiler wrote it. A driver reads as many bytes as
    ///   the image itself claims.
    pub const unsafe fn new(compute_capability: (u32, u32), image: Cow<'a, [u8]>) -> Self {
        Self { compute_capability, image }
    }

    /// The bytes.
    #[must_use]
    pub fn image(&self) -> &[u8] {
        &self.image
    }

    /// The lowest compute capability of the devices that run the code.
    #[must_use]
    pub fn compute_capability(&self) -> (u32, u32) {
        self.compute_capability
    }

    /// The same code with bytes of its own.
    #[must_use]
    pub fn into_owned(self) -> Cubin<'static> {
        let image = Cow::Owned(self.image.into_owned());
        Cubin { compute_capability: self.compute_capability, image }
    }

    /// The image of `images` for a device: of those that the device runs, the one for the highest
    /// compute capability.
    #[must_use]
    pub fn select(images: &[Self], (major, minor): (u32, u32)) -> Option<&Self> {
        images
            .iter()
            .filter(|c| c.compute_capability.0 == major && c.compute_capability.1 <= minor)
            .max_by_key(|c| c.compute_capability.1)
    }
}

impl fmt::Debug for Cubin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.compute_capability;
        write!(f, "Cubin(sm_{major}{minor}, {} bytes)", self.image.len())
    }
}

#[cfg(test)]
#[path = "../../tests/unit/cubin.rs"]
mod tests;
