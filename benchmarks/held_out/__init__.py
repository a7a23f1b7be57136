"""Broken batch decoders that no audit or probe was written against: what either finds of them is its score.

Each is :class:`~specdec_fast.EQSpec` with one part replaced and always decodes to the end. They were chosen from where
implementations of batch speculative decoding go wrong, without a look at how a fault is found. After each of the first
three sets was scored, the detectors were mended with it in view; ``FOURTH`` was scored last.
"""

from .acceptance import (
    BatchMaximum,
    BatchMinimum,
    BonusIndexClamped,
    BonusOfRowAbove,
    FirstDraftUnverified,
    GapsAccepted,
    LateBonus,
    TopTwoAccepted,
)
from .base import HeldOut
from .columns import (
    CroppedToBestRow,
    FirstColumnLost,
    FirstDraftTwice,
    FirstRejectedKept,
    LastDraftDropped,
    LongestRowUncropped,
    NothingAcceptedNothingCropped,
    OneDraftEntryKept,
    OpeningEntryLost,
    SinkTwice,
)
from .kv_cache import (
    CacheNotCompacted,
    DraftNotMoved,
    HeadsExchanged,
    KeysScaledAgain,
    LayerNotMoved,
    NeighboursExchanged,
    NewestValuesExchanged,
    OpeningValueOverwritten,
    RoundedMove,
    StaleBonus,
    TailChannelsNotMoved,
    ValuesNotMoved,
)
from .mask import (
    DraftsAsSiblings,
    FutureVisible,
    LastChunkUnmasked,
    PaddingEdgeVisible,
    PaddingForgottenOnShrink,
    ParentHidden,
    ShortWindow,
)
from .positions import (
    DraftsShareOpeningPosition,
    OnePositionPerBlock,
    PositionsEndWithPrompt,
    PositionsNotCompacted,
    PositionsPauseAfterMove,
    PromptPaddingCounted,
    SharedPositionCounter,
)
from .rows import FinishOrder, LongestFirst, SlotsMisread
from .stopping import EosDropped, FirstEosEndsAll, FirstEosIdOnly, OnlyBonusStops, RejectedEosStops, TokensAfterEos

__all__ = ["FOURTH", "HELD_OUT", "SECOND", "THIRD", "HeldOut"]

HELD_OUT: dict[str, type[HeldOut]] = {
    "shared-position-counter": SharedPositionCounter,
    "prompt-padding-counted": PromptPaddingCounted,
    "positions-not-compacted": PositionsNotCompacted,
    "layer-not-moved": LayerNotMoved,
    "values-not-moved": ValuesNotMoved,
    "rounded-move": RoundedMove,
    "draft-not-moved": DraftNotMoved,
    "cache-not-compacted": CacheNotCompacted,
    "last-draft-dropped": LastDraftDropped,
    "first-rejected-kept": FirstRejectedKept,
    "first-draft-twice": FirstDraftTwice,
    "padding-edge-visible": PaddingEdgeVisible,
    "future-visible": FutureVisible,
    "short-window": ShortWindow,
    "gaps-accepted": GapsAccepted,
    "batch-maximum": BatchMaximum,
    "late-bonus": LateBonus,
    "tokens-after-eos": TokensAfterEos,
    "only-bonus-stops": OnlyBonusStops,
    "rejected-eos-stops": RejectedEosStops,
    "finish-order": FinishOrder,
    "slots-misread": SlotsMisread,
}

SECOND: dict[str, type[HeldOut]] = {
    "positions-end-with-prompt": PositionsEndWithPrompt,
    "one-position-per-block": OnePositionPerBlock,
    "keys-scaled-again": KeysScaledAgain,
    "heads-exchanged": HeadsExchanged,
    "opening-value-overwritten": OpeningValueOverwritten,
    "neighbours-exchanged": NeighboursExchanged,
    "first-column-lost": FirstColumnLost,
    "nothing-accepted-nothing-cropped": NothingAcceptedNothingCropped,
    "sink-twice": SinkTwice,
    "drafts-as-siblings": DraftsAsSiblings,
    "last-chunk-unmasked": LastChunkUnmasked,
    "top-two-accepted": TopTwoAccepted,
    "bonus-of-row-above": BonusOfRowAbove,
    "bonus-index-clamped": BonusIndexClamped,
    "batch-minimum": BatchMinimum,
    "first-eos-ends-all": FirstEosEndsAll,
    "first-eos-id-only": FirstEosIdOnly,
    "eos-dropped": EosDropped,
    "longest-first": LongestFirst,
}

THIRD: dict[str, type[HeldOut]] = {
    "one-draft-entry-kept": OneDraftEntryKept,
    "longest-row-uncropped": LongestRowUncropped,
    "positions-pause-after-move": PositionsPauseAfterMove,
    "newest-values-exchanged": NewestValuesExchanged,
    "stale-bonus": StaleBonus,
    "parent-hidden": ParentHidden,
}

FOURTH: dict[str, type[HeldOut]] = {
    "drafts-share-opening-position": DraftsShareOpeningPosition,
    "opening-entry-lost": OpeningEntryLost,
    "cropped-to-best-row": CroppedToBestRow,
    "tail-channels-not-moved": TailChannelsNotMoved,
    "first-draft-unverified": FirstDraftUnverified,
    "padding-forgotten-on-shrink": PaddingForgottenOnShrink,
}
