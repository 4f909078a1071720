"""Types of single settings, with their ranges."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

FORBID = ConfigDict(extra="forbid")  # of every settings class
LONGEST_NAME = 200  # bytes; file systems take 255
AUTO_AUGMENT = (
    r"(rand(-(n[0-9]{1,2}|(m|w|p|inc|mstd|mmax)[0-9.]{1,5}))+|original|originalr|v0|v0r|3a)"
)
HUGE = 10**9  # what counts nothing that costs memory or time stays below it


def folder_name(value: str) -> str:
    if not value.isprintable() or value.strip() != value or set(value) & set("/\\"):
        raise ValueError("must be a plain folder name without slashes")
    if value.startswith(".") or not 1 <= len(value.encode()) <= LONGEST_NAME:
        raise ValueError(f"must have 1 to {LONGEST_NAME} bytes and no leading dot")
    return value


def number_as_text(value: Any) -> Any:
    return str(value) if type(value) in (int, float) else value


def auto_augment_policy(value: str) -> str:
    if re.fullmatch(AUTO_AUGMENT, value):
        return value
    raise ValueError("must be one of timm's policies, such as rand-m9-mstd0.5-inc1, or null")


Whole = Annotated[int, Field(strict=True, ge=0, le=HUGE)]
Count = Annotated[int, Field(strict=True, ge=1, le=HUGE)]
# Bounds far above what trains, below what hangs or fills the memory before it fails.
Pixels = Annotated[int, Field(strict=True, ge=1, le=4096)]
Blocks = Annotated[int, Field(strict=True, ge=1, le=512)]
Width = Annotated[int, Field(strict=True, ge=1, le=2**16)]
Images = Annotated[int, Field(strict=True, ge=1, le=10**6)]  # of a batch
Processes = Annotated[int, Field(strict=True, ge=0, le=1024)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=1024)]
Few = Annotated[int, Field(strict=True, ge=1, le=16)]
Amount = Annotated[float, Field(strict=True, ge=0, le=1e38, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, le=1e38, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Ratio = Annotated[float, Field(strict=True, gt=0, le=64, allow_inf_nan=False)]
Crop = Annotated[float, Field(strict=True, ge=0.25, le=1)]
Flag = Annotated[bool, Field(strict=True)]
Mean = Annotated[float, Field(strict=True, ge=-1000, le=1000)]  # of values in 0..1
Deviation = Annotated[float, Field(strict=True, ge=1e-6, le=1000)]
Channels = Annotated[list[Mean], Field(min_length=3, max_length=3)]
Scales = Annotated[list[Deviation], Field(min_length=3, max_length=3)]
Range = Annotated[list[Positive], Field(min_length=2, max_length=2)]
FolderName = Annotated[str, AfterValidator(folder_name)]
RunName = Annotated[str, BeforeValidator(number_as_text), AfterValidator(folder_name)]
AutoAugment = Annotated[str, AfterValidator(auto_augment_policy)]
