//! Random damage from a seed, for the tests of this suite and of the workbench's.

/// A small generator of the xorshift kind.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)) * n as u128) >> 64) as usize
    }

    pub fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }
}

pub fn bytes_mutated(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..dice.of(&[1, 1, 2, 5, 50]) {
        let at = dice.below(bytes.len() + 1);
        let end = (at + dice.of(&[1, 2, 9, 100, 1_000_000])).min(bytes.len());
        match dice.below(4) {
            0 if at < bytes.len() => bytes[at] = dice.below(256) as u8,
            1 => drop(bytes.drain(at..end)),
            2 => {
                let size = dice.of(&[0, 1, 7, 100_000_000, 100_000_001, 1 << 32, u64::MAX]);
                bytes.splice(at..at, size.to_le_bytes());
            }
            _ => {
                let text = dice.of(&[
                    "\u{0}",
                    "-",
                    "1e999",
                    "null",
                    "{",
                    "]",
                    "\"",
                    "\\ud800",
                    "\n",
                    "\r",
                    "9999999999999999999999",
                ]);
                bytes.splice(at..at, text.bytes());
            }
        }
    }
}
