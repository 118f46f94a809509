use wgpu::Backend;

/// An interface to a GPU's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// Vulkan: Linux, Windows, Android.
    Vulkan,
    /// Metal: macOS.
    Metal,
    /// DirectX 12: Windows.
    Dx12,
}

impl Api {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Api::Vulkan => "Vulkan",
            Api::Metal => "Metal",
            Api::Dx12 => "DirectX 12",
        }
    }

    pub(crate) fn of(backend: Backend) -> Option<Api> {
        match backend {
            Backend::Vulkan => Some(Api::Vulkan),
            Backend::Metal => Some(Api::Metal),
            Backend::Dx12 => Some(Api::Dx12),
            _ => None,
        }
    }
}
