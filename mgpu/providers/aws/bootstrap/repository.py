"""The image repository of base: the images that nodes pull. Scanned on push, tags never moved, old images expire."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from mgpu.errors import CleanupFailed
from mgpu.providers.aws import names
from mgpu.providers.aws.bootstrap.resource import (
    Found,
    Resource,
    Site,
    base_tags,
    fixed,
    tags_of,
    tags_there,
)
from mgpu.providers.aws.failures import unless
from mgpu.providers.aws.iam import policies

_NONE = ("RepositoryNotFoundException",)
_NO_POLICY = ("LifecyclePolicyNotFoundException",)


class Repository(Resource):
    """An image repository."""

    facts: ClassVar[dict[str, str]] = {"arn": "its ARN", "uri": "its address for docker"}

    name: str = Field(default=names.REPOSITORY, description="name")
    untagged_days: int = Field(default=14, ge=1, description="days after which an image without a tag expires")
    keep_images: int = Field(
        default=200,
        ge=1,
        description="images that are kept, the newest ones: schedules and passes name theirs by digest",
    )
    scan_on_push: bool = fixed(True, "every image is looked through for known weaknesses")
    immutable_tags: bool = fixed(True, "a tag means one image for ever")
    lifecycle: str = fixed("", "the lifecycle policy, JSON")


class RepositoryManager:
    """Asks ECR for it."""

    kind: ClassVar[str] = "repository"
    resource: ClassVar[type[Resource]] = Repository

    def __init__(self, site: Site) -> None:
        self.site = site

    def complete(self, wanted: Repository) -> Repository:
        """With its lifecycle."""
        name = wanted.existing or wanted.name
        lifecycle = policies.canonical(_lifecycle(wanted.untagged_days, wanted.keep_images))
        return wanted.model_copy(update={"name": name, "lifecycle": lifecycle})

    def expected(self, wanted: Repository) -> dict[str, str]:
        """All facts follow from the name."""
        account, region = self.site.account.id(), self.site.region
        suffix = "amazonaws.com.cn" if policies.partition(region) == "aws-cn" else "amazonaws.com"
        return {
            "arn": policies.repository_arn(region, account, wanted.name),
            "uri": f"{account}.dkr.ecr.{region}.{suffix}/{wanted.name}",
        }

    def look(self, wanted: Repository) -> Found[Repository] | None:
        """As it is."""
        answer = unless(_NONE, self._ecr.describe_repositories, repositoryNames=[wanted.name])
        if answer is None:
            return None
        found = answer["repositories"][0]
        facts = {"arn": found["repositoryArn"], "uri": found["repositoryUri"]}
        if wanted.existing is not None:
            return Found(wanted.name, wanted, facts, ours=False)
        tags = tags_of(self._ecr.list_tags_for_resource(resourceArn=facts["arn"]).get("tags"))
        policy = unless(_NO_POLICY, self._ecr.get_lifecycle_policy, repositoryName=wanted.name) or {}
        state = {
            "tags": tags_there(wanted, tags),
            "scan_on_push": bool(found.get("imageScanningConfiguration", {}).get("scanOnPush")),
            "immutable_tags": found.get("imageTagMutability") == "IMMUTABLE",
            "lifecycle": policies.canonical(json.loads(policy["lifecyclePolicyText"])) if policy else "",
        }
        return Found(wanted.name, wanted.model_copy(update=state), facts, ours=names.BASE in tags)

    def make(self, wanted: Repository) -> Found[Repository]:
        """One without images, with our tag."""
        found = self._ecr.create_repository(repositoryName=wanted.name, tags=names.tag_list(base_tags(wanted)))[
            "repository"
        ]
        facts = {"arn": found["repositoryArn"], "uri": found["repositoryUri"]}
        return Found(wanted.name, wanted.model_copy(update={"scan_on_push": False, "lifecycle": ""}), facts)

    def align(self, found: Found[Repository], wanted: Repository) -> None:
        """Sets all of it again."""
        ecr, repository = self._ecr, {"repositoryName": wanted.name}
        ecr.put_image_scanning_configuration(**repository, imageScanningConfiguration={"scanOnPush": True})
        ecr.put_image_tag_mutability(**repository, imageTagMutability="IMMUTABLE")
        rules = json.dumps(_lifecycle(wanted.untagged_days, wanted.keep_images))
        ecr.put_lifecycle_policy(**repository, lifecyclePolicyText=rules)
        if wanted.tags:
            ecr.tag_resource(resourceArn=found.facts["arn"], tags=names.tag_list(base_tags(wanted)))

    def delete(self, wanted: Repository) -> None:
        """With its images, which can be built again."""
        unless(_NONE, self._ecr.delete_repository, repositoryName=wanted.name, force=True)
        if unless(_NONE, self._ecr.describe_repositories, repositoryNames=[wanted.name]) is not None:
            raise CleanupFailed(f"repository {wanted.name} is still there", "ECR accepted the request.", "Try again.")

    @property
    def _ecr(self) -> Any:
        return self.site.client("ecr")


def _lifecycle(untagged_days: int, keep_images: int) -> dict[str, Any]:
    untagged = {"tagStatus": "untagged", "countType": "sinceImagePushed", "countUnit": "days"}
    every = {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": keep_images}
    selections = ({**untagged, "countNumber": untagged_days}, every)
    return {
        "rules": [
            {"rulePriority": priority, "selection": selection, "action": {"type": "expire"}}
            for priority, selection in enumerate(selections, start=1)
        ]
    }
